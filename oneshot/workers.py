"""The processes that share a run: each reads its part of the text; sums, and what one of them computes, reach all.

`accelerate launch --multi_gpu --num_processes N` or `torchrun --nproc-per-node N` starts them, on CPUs, too;
torch.distributed carries the sums, by nccl between GPUs and by gloo between CPUs. All of them must see the same files.
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
    """This process among all that share the run. One alone shares nothing, and waits for nobody."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """This process's share of `count` things in a row; shares differ by one at most."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def owns(self, task: int) -> bool:
        """Whether a numbered task is this process's: they take turns."""
        return task % self.size == self.rank

    def sum_(self, *tensors: torch.Tensor) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size > 1:
            with _together():
                for tensor in tensors:
                    torch.distributed.all_reduce(tensor)

    def share(self, task: int, compute: Callable[[], Result]) -> Result:
        """What the owner of a task computes; tensors in it must be in host memory."""
        if self.size == 1:
            return compute()
        held = [compute() if self.owns(task) else None]
        with _together():
            torch.distributed.broadcast_object_list(held, src=task % self.size)
        return held[0]  # type: ignore[return-value]

    def wait(self) -> None:
        """Return when all processes have come here."""
        if self.size > 1:
            with _together():
                torch.distributed.barrier()


ALONE = Workers()


def launched_rank() -> int:
    """This process's rank among those that a launcher started; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def join_workers(*, on_cpu: bool) -> Workers:
    """The processes that the launcher started, by its environment; this one alone without a launcher.

    Raises `WorkerError` where the others cannot be reached.
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
    except RuntimeError as error:  # what torch.distributed raises of all that can happen to the others
        raise WorkerError(
            "Another process of this run ended or cannot be reached; see its message, and start all of them again."
        ) from error
