"""The dtype of stored weights: what a cast gives, and what it takes."""

import logging
import sys

import numpy as np
import pytest
import torch

from oneshot.export.gguf_tensors import quantised
from oneshot.export.saving import cast
from oneshot.machine.memory import peak_bytes, reset_peak

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_a_cast_takes_the_result_alone() -> None:
    """A table may be a quarter of a model."""
    table = torch.ones(64 * MIB // 4)
    reset_peak()
    before = peak_bytes()
    result = cast("bfloat16", {"table": table})["table"]
    assert result.dtype == torch.bfloat16
    assert peak_bytes() - before < 48 * MIB


def test_finite_values_beyond_the_range_are_clamped(caplog: pytest.LogCaptureFixture) -> None:
    inf, nan = float("inf"), float("nan")
    tensors = {"far": torch.tensor([1e5, -2e5, inf, 1.0]), "nan": torch.tensor([nan, 1e6]), "none": torch.empty(0)}
    with caplog.at_level(logging.WARNING):
        found = cast("float16", tensors)
    assert found["far"].tolist() == [65504.0, -65504.0, inf, 1.0]
    assert found["nan"].isnan().tolist() == [True, False]
    assert found["nan"][1] == 65504.0
    assert ["far has 2 values" in caplog.text, "nan has 1 values" in caplog.text] == [True, True]


def test_a_matrix_of_which_float16_keeps_little_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Its values became zeros without a word."""
    values = {"little": 3e-6, "enough": 5e-6, "nothing": 0.0}
    tensors = {name: torch.full((32, 32), value) for name, value in values.items()} | {"vector": torch.full((9,), 3e-6)}
    with caplog.at_level(logging.WARNING):
        cast("float16", tensors)
        quantised("in_blocks", np.full((4, 64), 4e-4, np.float32))  # whose scales are float16
        quantised("enough_in_blocks", np.full((4, 64), 5e-4, np.float32))
    assert [record.message.split()[0] for record in caplog.records] == ["little", "in_blocks"]
