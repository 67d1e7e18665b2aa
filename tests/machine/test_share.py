"""What processes share: tensors inside records arrive as the owner had them; errors of one process are its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oneshot.errors import DeviceError, WorkerError
from oneshot.machine.workers import _together, _with_tensors, _without_tensors

PROGRAM = """
import torch
from oneshot.compression.correction import Factors
from oneshot.machine import join_workers

workers = join_workers(on_cpu=True)
for owner in range(2):
    made = torch.Generator().manual_seed(owner)
    weight = torch.randn(3, 4, generator=made).bfloat16().T  # not contiguous
    def compute():
        factors = Factors(torch.arange(3), weight, predicted_error=0.5)
        return factors, None, [{"flags": torch.tensor([True, False]), "none": torch.empty(0, 2)}, "text", 1]
    factors, nothing, (record, text, number) = workers.share(owner, compute)
    assert torch.equal(factors.weight, weight) and factors.weight.dtype == torch.bfloat16
    assert factors.kept_columns.tolist() == [0, 1, 2] and factors.predicted_error == 0.5 and nothing is None
    assert record["flags"].tolist() == [True, False] and record["none"].shape == (0, 2)
    assert (text, number) == ("text", 1)
workers.wait()
torch.distributed.destroy_process_group()
"""


def test_two_processes_share_records_with_tensors(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(program)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_tensors_leave_a_value_and_return() -> None:
    value = ({"a": torch.ones(2)}, [torch.zeros(1), 3], "b")
    tensors: list[torch.Tensor] = []
    skeleton = _without_tensors(value, tensors)
    assert len(tensors) == 2
    waiting = iter(tensors)
    again = _with_tensors(skeleton, lambda _: next(waiting))
    assert again[0]["a"] is tensors[0]
    assert again[1:] == ([tensors[1], 3], "b")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("connection closed"), WorkerError),
        (NotImplementedError("Using RTX 4000 series"), DeviceError),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
    ],
)
def test_errors_of_this_process_are_not_blamed_on_another(raised: Exception, expected: type[Exception]) -> None:
    with pytest.raises(expected), _together():
        raise raised
