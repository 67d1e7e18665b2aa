"""The processes that share a run: each reads its part of the text, and all receive the sums and the solutions.

`accelerate launch --multi_gpu --num_processes N` or `torchrun --nproc-per-node N` starts them, also on CPUs.
torch.distributed carries the sums, by NCCL between GPUs and by gloo between CPUs. All processes see the same files.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar

import torch

from oneshot.errors import DeviceError, WorkerError, cause
from oneshot.machine.sharing import Loads

PANEL_ROWS = 512  # of a Gram that are summed over processes at once
PATIENCE = timedelta(minutes=30)  # for a process that computes what all others wait for
CONNECTING = 5  # times its timeout gloo waits until others connect, also if they have ended
INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that names gloo's network interface
ENDED = "Another process of this run ended or cannot be reached; see its message, and start all of them again."
UNREACHED = (
    "Another process of this run ended or cannot be reached; see its message, and on several machines give each the "
    f"first machine's address as --master-addr, or name the network interface in {INTERFACE}."
)

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
        """Return this process's share of `count` consecutive items; shares differ by at most one.

        With fewer items than processes the first process has one, because it reports, and the last ones have none.
        """
        start, stop = (-(-rank * count // self.size) for rank in (self.rank, self.rank + 1))
        return slice(start, stop)

    def owns(self, task: int) -> bool:
        """Return whether a numbered task, which the others wait for, belongs to this process; processes take turns."""
        return task % self.size == self.rank

    def sum_(self, *tensors: torch.Tensor) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size > 1:
            with _together():
                for tensor in tensors:
                    torch.distributed.all_reduce(tensor)

    def sum_grams_(self, *grams: torch.Tensor) -> None:
        """Replace what is on and above the diagonal of each `(…, n, n)` by its sum over all processes.

        What is below is left as it is, so half as many numbers travel.
        """
        for gram in grams if self.size > 1 else ():
            for start in range(0, gram.shape[-1], PANEL_ROWS):
                panel = gram[..., start : start + PANEL_ROWS, start:]
                travelling = panel.contiguous()
                self.sum_(travelling)
                panel.copy_(travelling)

    def sum_counts(self, device: torch.device, *counts: int) -> list[int]:
        """Return the sums of counts over all processes; one alone waits for no device."""
        if self.size == 1:
            return list(counts)
        totals = torch.tensor(counts, device=device)
        self.sum_(totals)
        summed: list[int] = totals.tolist()
        return summed

    def share(self, task: int, compute: Callable[[], Result]) -> Result:
        """Return what the owner of a task computes, on every process.

        Tensors inside tuples, lists, dictionaries and records travel as tensors, and the rest as a pickle. Each is
        where the owner had it, on the host or on the process's own device.
        """
        if self.size == 1:
            return compute()
        owner, tensors = task % self.size, list[torch.Tensor]()
        held = [_without_tensors(compute(), tensors) if self.owns(task) else None]
        with _together():
            torch.distributed.broadcast_object_list(held, src=owner)
            sent = iter(tensors)
            shared: Result = _with_tensors(held[0], lambda slot: _broadcast(slot, next(sent, None), owner))
        return shared

    def share_all(
        self, jobs: Sequence[Callable[[], Result]], costs: Sequence[float], loads: Loads | None = None
    ) -> Iterator[Result]:
        """Yield what each job returns, on every process; each process first computes its own ones.

        Args:
            costs: predicted, of the jobs. loads: what the processes have to compute beside them; None: nothing.
        """
        if self.size == 1:
            yield from (job() for job in jobs)
            return
        owners = (Loads(self.size) if loads is None else loads).share_out(costs)
        own = {number: jobs[number]() for number, owner in enumerate(owners) if owner == self.rank}
        for number, owner in enumerate(owners):
            yield self.share(owner, partial(own.pop, number))

    def gather(self, items: tuple[Result, ...]) -> tuple[Result, ...]:
        """Return the items of all processes, on every process."""
        return tuple(item for rank in range(self.size) for item in self.share(rank, lambda: items))

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            with _together():
                torch.distributed.barrier()


ALONE = Workers()


def join_workers(*, on_cpu: bool) -> Workers:
    """Return the processes that the launcher started, read from its environment; only this one without a launcher.

    Raises `WorkerError` if the others cannot be reached.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from accelerate import PartialState
    from torch.distributed.distributed_c10d import _set_pg_timeout

    with _together(UNREACHED), _by_the_way_to(os.environ.get("MASTER_ADDR", "")):
        state = PartialState(cpu=on_cpu, timeout=PATIENCE / CONNECTING)
        _set_pg_timeout(PATIENCE)
    return Workers(state.process_index, state.num_processes, state.local_process_index)


@contextmanager
def _by_the_way_to(first: str) -> Iterator[None]:
    """Let gloo tell the others the address by which this machine reaches the first process, if they are on several.

    On its own gloo tells the address of the host's name, which is the loopback address on many machines.
    """
    interface = None if INTERFACE in os.environ else _interface_to(first)
    if interface is None:
        yield
        return
    os.environ[INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[INTERFACE]


def _interface_to(address: str) -> str | None:
    """Return the network interface with the way to an address; None if it is this machine's loopback or unknown."""
    import psutil

    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(place)  # sends nothing
            own = way.getsockname()[0]
    except OSError:
        return None
    if ip_address(own).is_loopback:
        return None
    names = [name for name, held in psutil.net_if_addrs().items() if own in {each.address for each in held}]
    return names[0] if names else None


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in what is shared."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_device: bool


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value with a slot for every tensor; the tensors are appended to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(tuple(value.shape), value.dtype, value.device.type != "cpu")
    return _mapped(value, lambda part: _without_tensors(part, tensors))


def _with_tensors(value: Any, tensor_of: Callable[[_Slot], torch.Tensor]) -> Any:
    """Return the value with a tensor in every slot, in the order of `_without_tensors`."""
    return tensor_of(value) if isinstance(value, _Slot) else _mapped(value, lambda part: _with_tensors(part, tensor_of))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with each part changed; anything else as it is."""
    if type(value) in (tuple, list):
        return type(value)(change(part) for part in value)
    if type(value) is dict:
        return {name: change(part) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type | _Slot):
        changed = {each.name: change(getattr(value, each.name)) for each in fields(value) if each.init}
        return replace(value, **changed)
    return value


def _broadcast(slot: _Slot, tensor: torch.Tensor | None, owner: int) -> torch.Tensor:
    """Return the owner's tensor; NCCL carries only what is on a device, and gloo what is on the host."""
    by_device = torch.distributed.get_backend() == "nccl"
    way = torch.device("cuda", torch.cuda.current_device()) if by_device else torch.device("cpu")
    home = torch.device("cuda", torch.cuda.current_device()) if slot.on_device else torch.device("cpu")
    moving = torch.empty(slot.shape, dtype=slot.dtype, device=way) if tensor is None else tensor.to(way).contiguous()
    torch.distributed.broadcast(moving, src=owner)
    return moving.to(home) if tensor is None else tensor


@contextmanager
def _together(message: str = ENDED) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:  # of this process alone
        raise
    except NotImplementedError as error:  # accelerate's, of a card that lacks a way to the others
        raise DeviceError(f"The processes cannot be joined ({cause(error)}).") from error
    except RuntimeError as error:  # torch.distributed raises it for every failure of another process
        raise WorkerError(message) from error
