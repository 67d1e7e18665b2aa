"""A result with sizes that `--serve` planned, rounded in groups, on two processes of vLLM that share its tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ask_vllm_together
from engines import BY_LAYER, SHARED_TENSORS, SIZES, Expected
from factories import build_model
from rounded import rounded_result

from oneshot import Config
from oneshot.pipeline import compress

GROUP = 32
LARGER: dict[str, Any] = {
    "hidden": 256,
    "width": 384,
    "heads": 8,
    "groups": 4,
    "head_dim": 32,
    "layers": 2,
    "tied": True,
}
# groups of the rounded weights, and the largest difference of a log-probability. vLLM rounds to bfloat16 once more
# where a linear of low rank reads, and W8A8 also what a linear reads
FORMATS: dict[str, tuple[int | None, float]] = {"W4A16": (GROUP, 0.08), "W8A8": (None, 0.25)}


def test_two_processes_answer_as_the_rounded_weights_do(
    save_model: Callable[..., Path], text_file: Path, tmp_path: Path
) -> None:
    source, output = save_model(build_model(**SIZES | LARGER)), tmp_path / "result"
    options: dict[str, Any] = {"calibration": str(text_file), "num_sequences": 16, "sequence_length": 32}
    options |= BY_LAYER | {"round_to": None, "sparsity": 0.3, "serve": {"engine": "vllm", "tp": 2, "group": GROUP}}
    compress(Config.of(str(source), str(output), device="cpu", **options))
    expected, requests = [], []
    for name, (group, _) in FORMATS.items():
        rounded_result(output, tmp_path / name, tmp_path / f"{name}-plain", group=group)
        expected.append(Expected(tmp_path / f"{name}-plain", source))
        request = {"folder": str(tmp_path / name), "prompts": expected[-1].prompts, "max_tokens": 1}
        requests.append(request | {"dtype": "bfloat16", "options": SHARED_TENSORS})
    layers = expected[0].model.config.layers
    assert any(layer["output_rank"] for layer in layers)
    assert any(layer["up_rank"] for layer in layers)
    for answers, one, (_, largest) in zip(
        ask_vllm_together(requests, tmp_path), expected, FORMATS.values(), strict=True
    ):
        assert not isinstance(answers, str), answers[-4000:]
        for theirs, ours in zip(answers, one.answers, strict=True):
            assert theirs["scores"] == pytest.approx(ours["scores"][: len(theirs["scores"])], abs=largest)
