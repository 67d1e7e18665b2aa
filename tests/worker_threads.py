"""Workers that are threads of one process: a run by several processes without starting any."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import pytest
import torch

from oneshot.job import Job
from oneshot.machine import Workers
from oneshot.run import Run

Result = TypeVar("Result")


@dataclass
class Group:
    """What the threads of a run share: a place for each, and a barrier."""

    size: int
    places: list[Any] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.places, self.barrier = [None] * self.size, threading.Barrier(self.size, timeout=60)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what every thread gives here, on all of them."""
        self.places[rank] = value
        self.barrier.wait()
        given = list(self.places)
        self.barrier.wait()  # nobody gives the next value before all have read
        return given


@dataclass(frozen=True)
class ThreadWorkers(Workers):
    """As `Workers`, between threads; objects travel as copies, as between processes."""

    group: Group = field(default_factory=lambda: Group(1))

    def sum_(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.copy_(sum(self.group.exchange(self.rank, tensor.clone())))

    def share(self, task: int, compute: Callable[[], Result]) -> Result:
        value = compute() if self.owns(task) else None
        sent = self.group.exchange(self.rank, pickle.dumps(value) if self.owns(task) else None)
        return value if self.owns(task) else pickle.loads(sent[task % self.size])

    def wait(self) -> None:
        self.group.barrier.wait()


def run_in_threads(size: int, run: Callable[[], Result]) -> list[Result]:
    """Return what a run gives in each of so many workers. An exception of the first worker that fails is raised."""
    group, own = Group(size), threading.local()

    def of_worker(rank: int) -> Result:
        own.workers = ThreadWorkers(rank, size, rank, group)
        try:
            return run()
        except BaseException:
            group.barrier.abort()
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as executor:
        patch.setattr("oneshot.run.run.join_workers", lambda **_: own.workers)
        for member in (*vars(Run).values(), *vars(Job).values()):
            if isinstance(member, cached_property):  # before Python 3.12 it has one lock for all instances
                patch.setattr(member, "lock", nullcontext(), raising=False)
        futures = [executor.submit(of_worker, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
