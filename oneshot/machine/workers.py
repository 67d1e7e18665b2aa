"""The processes that share a run: each reads its part of the text, and all receive the sums and the solutions.

`accelerate launch --multi_gpu --num_processes N` or `torchrun --nproc-per-node N` starts them, also on CPUs.
torch.distributed carries the sums, by NCCL between GPUs and by gloo between CPUs. All processes see the same files.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from oneshot.errors import WorkerError

PATIENCE = timedelta(minutes=30)  # for a process that computes what all others wait for

Result = TypeVar("Result")


@dataclass(frozen=True)
class Workers:
    """Identify this process among all that share the run. A single process shares nothing and never waits."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Return whether this process writes and reports."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Return this process's share of `count` consecutive items; shares differ by at most one."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def owns(self, task: int) -> bool:
        """Return whether a numbered task belongs to this process; processes take turns."""
        return task % self.size == self.rank

    def sum_(self, *tensors: torch.Tensor) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size > 1:
            with _together():
                for tensor in tensors:
                    torch.distributed.all_reduce(tensor)

    def share(self, task: int, compute: Callable[[], Result]) -> Result:
        """Return what the owner of a task computes, on every process; its tensors must be in host memory."""
        if self.size == 1:
            return compute()
        held = [compute() if self.owns(task) else None]
        with _together():
            torch.distributed.broadcast_object_list(held, src=task % self.size)
        return held[0]  # type: ignore[return-value]

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            with _together():
                torch.distributed.barrier()


ALONE = Workers()


def launched_rank() -> int:
    """Return this process's rank among those that a launcher started; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def join_workers(*, on_cpu: bool) -> Workers:
    """Return the processes that the launcher started, read from its environment; only this one without a launcher.

    Raises `WorkerError` if the others cannot be reached.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from accelerate import PartialState

    with _together():
        state = PartialState(cpu=on_cpu, timeout=PATIENCE)
    return Workers(state.process_index, state.num_processes, state.local_process_index)


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises it for every failure of another process
        raise WorkerError(
            "Another process of this run ended or cannot be reached; see its message, and start all of them again."
        ) from error
