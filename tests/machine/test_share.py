"""What processes share: tensors inside records arrive as the owner had them; errors of one process are its own."""

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import CONTEXT, launched, wait

from oneshot.compression.correction import Factors
from oneshot.errors import DeviceError, WorkerError
from oneshot.machine import join_workers
from oneshot.machine.workers import _together, _with_tensors, _without_tensors


def share_records(environment: Mapping[str, str], told: Path) -> None:
    """Share a record of each of two processes; run in both of them. What is wrong is written to a file."""
    os.environ.update(environment)
    try:
        workers = join_workers(on_cpu=True)
        for owner in range(2):
            weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(owner)).bfloat16().T  # not contiguous

            def compute(weight: torch.Tensor = weight) -> Any:
                factors = Factors(torch.arange(3), weight, predicted_error=0.5)
                return factors, None, [{"flags": torch.tensor([True, False]), "none": torch.empty(0, 2)}, "text", 1]

            factors, nothing, (record, text, number) = workers.share(owner, compute)
            assert torch.equal(factors.weight, weight)
            assert factors.weight.dtype == torch.bfloat16
            assert factors.kept_columns.tolist() == [0, 1, 2]
            assert (factors.predicted_error, nothing) == (0.5, None)
            assert record["flags"].tolist() == [True, False]
            assert record["none"].shape == (0, 2)
            assert (text, number) == ("text", 1)
        computed: list[int] = []
        jobs = [lambda number=number: computed.append(number) or torch.tensor(number) for number in range(4)]
        assert [int(one) for one in workers.share_all(jobs, [1.0, 3.0, 1.0, 1.0])] == [0, 1, 2, 3]
        assert computed == [[1], [0, 2, 3]][workers.rank]
        workers.wait()
        torch.distributed.destroy_process_group()
    except BaseException:
        told.write_text(traceback.format_exc())
        raise


def test_two_processes_share_records_with_tensors(tmp_path: Path) -> None:
    told = [tmp_path / f"told-{rank}" for rank in range(2)]
    processes = [CONTEXT.Process(target=share_records, args=each) for each in zip(launched(2), told, strict=True)]
    for process in processes:
        process.start()
    assert wait(processes) == [0, 0], [path.read_text() for path in told if path.exists()]


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
