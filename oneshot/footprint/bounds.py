"""The memory that a run may take, and where its activations are stored: the one place that decides both."""

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from oneshot_kernels import cholesky_pivots_

from oneshot.checkpoint import Model
from oneshot.config import MachineOptions
from oneshot.errors import MemoryLimitError
from oneshot.footprint.check import check_seconds
from oneshot.footprint.disk import offload_folder, refuse_full_disk, scaffold_bytes, scratch_bytes
from oneshot.footprint.expert_memory import group_sizes, num_groups
from oneshot.footprint.memory import (
    CUDA_SLACK_BYTES,
    DEVICE_SLACK_BYTES,
    HEAP_SHARE,
    SLACK_BYTES,
    stages,
    stages_of_layers,
    stages_outside_layers,
)
from oneshot.footprint.rates import measure_rates
from oneshot.footprint.seconds import predicted_phases
from oneshot.footprint.terms import Stage
from oneshot.footprint.work import Work
from oneshot.machine import Machine, Store
from oneshot.machine.memory import peak_bytes, peak_device_bytes, pinned_bytes
from oneshot.report.records import Footprint
from oneshot.report.words import gibibytes
from oneshot.stream import LayerBuilder
from oneshot.text import TABLES, ending_of, file_of, split_sources

logger = logging.getLogger(__name__)

DEVICE_SHARE = 0.9  # of a device's free memory: its allocator leaves gaps
Peak = tuple[int, Stage]  # bytes, and the stage that takes them
Candidate = tuple[Work, Store, Peak, Peak]  # where a run may keep activations; its peaks on host and device


@dataclass(frozen=True)
class Bounds:
    """Bytes that a run starts from and bytes that it may reach, on the host and on the device.

    `held`: of the process now. `peak`: the most it had. `forced`: whether the user set the limit. `scratch_free`: of
    the disk with `--offload-dir`.
    """

    host_held: int
    host_peak: int
    host_allowed: int
    host_forced: bool
    device_held: int
    device_peak: int
    device_allowed: int
    device_forced: bool
    scratch_free: int


def current_bounds(options: MachineOptions, device: torch.device) -> Bounds:
    """Return the bounds of a run in this process: what the user allows, or else what is free now."""
    import psutil

    held = psutil.Process().memory_info().rss
    device_held = device_free = 0
    if device.type == "cuda":
        device_held = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device) - device_held
        device_free = round(DEVICE_SHARE * (torch.cuda.mem_get_info(device)[0] + reserved))
    return Bounds(
        host_held=held,
        host_peak=peak_bytes(),
        host_allowed=options.max_memory_bytes or held + psutil.virtual_memory().available,
        host_forced=options.max_memory_bytes is not None,
        device_held=device_held,
        device_peak=peak_device_bytes(),
        device_allowed=options.max_device_memory_bytes or device_held + device_free,
        device_forced=options.max_device_memory_bytes is not None,
        scratch_free=shutil.disk_usage(offload_folder(options)).free,
    )


def load_libraries(model: Model, machine: Machine, calibration: str) -> None:
    """Load what the run will need: libraries, the family's model class, the workspaces of BLAS."""
    LayerBuilder(model, machine, sequence_length=2).load_classes()
    if any(ending_of(file_of(source)[0].name) in TABLES for source in split_sources(calibration)):
        import datasets  # noqa: F401
    for each in {machine.dtype, torch.float32, torch.float64}:
        square = torch.eye(64, dtype=each, device=machine.device)
        square @ square
    torch.linalg.cholesky(square.double())
    cholesky_pivots_(square.double(), rank=64)


def predict_footprint(
    work: Work,
    bounds: Bounds,
    options: MachineOptions,
    *,
    result_bytes: int,
    beside_bytes: int = 0,
    check: Sequence[Stage] = (),
    measure_time: bool,
    dtype: str = "",
) -> Footprint:
    """Return what a run will take; activations are stored on the device if all fits, else on the host, else on disk.

    The experts of a mixture's layers are taken in as few groups as fit, with a pass over the text for each.
    `beside_bytes`: of weights that lie beside the result until it is complete. `check`: stages of the check of the
    result, which a command leaves out if they do not fit. `dtype`: why the dtype was taken.

    Raises `MemoryLimitError` if a bound that the user set cannot hold even with activations on disk, or the disk of
    `--offload-dir` is too small. Warns if the free memory does not suffice.
    """
    stored = work.grid.dense.stored_parameters()
    compressed = stored if work.plan is None else work.grid.stack(work.plan).stored_parameters()
    work, store, host, device = _first_that_fits(work, bounds)
    phases, of_check = dict[str, dict[str, float]](), 0.0
    if measure_time:
        rates = measure_rates(work.device, work.dtype)
        phases = predicted_phases(work, rates, store)
        of_check = check_seconds(work, rates) if check else 0.0
    seconds = {stage: sum(spent.values()) for stage, spent in phases.items()}
    checked = [
        max(_peak(work, [stage], store, bounds, computed=computed)[0] for stage in check) if check else 0
        for computed in (False, True)
    ]
    scratch = scratch_bytes(work)
    if store == "disk":
        scratch += max(sum(stage.stores(work)) for stage in stages(work))
    refuse_full_disk(options, bounds.scratch_free, scratch)
    return Footprint(
        host_bytes=host[0],
        host_stage=host[1].name,
        device_bytes=device[0],
        device_stage=device[1].name if device[0] else "",
        store=store,
        experts_together=work.machine.experts_together,
        expert_groups=num_groups(work),
        result_bytes=result_bytes,
        disk_bytes=result_bytes + beside_bytes + scaffold_bytes(work),
        scratch_bytes=scratch,
        stored_parameters={"dense": stored, "compressed": compressed},
        seconds=seconds | {"total": sum(seconds.values())} if measure_time else {},
        exact=work.exact,
        check_bytes=checked[0],
        check_device_bytes=checked[1],
        check_fits=checked[0] <= bounds.host_allowed and checked[1] <= bounds.device_allowed,
        check_seconds=of_check,
        text_seconds=phases.get("prepare", {}).get("own text", 0.0),
        dtype=dtype,
    )


def fits(work: Work, bounds: Bounds) -> bool:
    """Return whether a run stays within the bounds in any way."""
    return any(_fits(one, bounds) for one in _candidates(work, bounds))


def _fits(candidate: Candidate, bounds: Bounds) -> bool:
    _, _, host, device = candidate
    return host[0] <= bounds.host_allowed and device[0] <= bounds.device_allowed


def _first_that_fits(work: Work, bounds: Bounds) -> Candidate:
    """Return the fastest way that fits; or else the first of those that need the least, if no bound is forced."""
    tried = list[Candidate]()
    for one in _candidates(work, bounds):
        if _fits(one, bounds):
            return one
        tried.append(one)
    host, device = tried[-1][2:]  # the last needs the least
    _refuse(host, bounds.host_allowed, bounds.host_forced, "host memory", "--max-memory")
    _refuse(device, bounds.device_allowed, bounds.device_forced, "memory", "--max-device-memory")
    return next(one for one in tried if (one[2][0], one[3][0]) == (host[0], device[0]))


def _candidates(work: Work, bounds: Bounds) -> Iterator[Candidate]:
    """Yield the ways of a run, the fastest first, and at last the one that needs the least.

    More groups of experts need less memory and more passes over the text. A pass takes a device less time than
    activations on disk, and a CPU more.
    """
    outside, on_cuda = stages_outside_layers(work), work.on_cuda
    stores: tuple[Store, ...] = ("device", "host", "disk") if on_cuda else ("host", "disk")
    for alike in (stores[:-1], stores[-1:]) if on_cuda else (stores,):
        for together in group_sizes(work):
            grouped = replace(work, machine=replace(work.machine, experts_together=together))
            listed = outside + stages_of_layers(grouped)
            for store in alike:
                host, device = (_peak(grouped, listed, store, bounds, computed=computed) for computed in (False, True))
                yield grouped, store, host, device


def _peak(work: Work, listed: list[Stage], store: Store, bounds: Bounds, *, computed: bool) -> Peak:
    """Return the peak on the host or on the device (`computed`), and its stage."""
    on_cuda = work.on_cuda
    if computed and not on_cuda:
        return 0, listed[0]

    def stored(stage: Stage) -> int:
        if store != ("device" if computed else "host"):
            return 0
        pinned = on_cuda and not computed
        return sum(pinned_bytes(size) if pinned else size for size in stage.stores(work))

    def needed(stage: Stage) -> float:
        size = stage.total(computed=computed)
        if not on_cuda:
            size += stage.total(computed=True)
        size += 0 if computed else work.beside_bytes  # whatever the stage reads, one tensor at a time
        return size * (1.0 if computed else HEAP_SHARE) + stored(stage)

    fullest = max(listed, key=needed)
    held, before = (bounds.device_held, bounds.device_peak) if computed else (bounds.host_held, bounds.host_peak)
    slack = DEVICE_SLACK_BYTES if computed else CUDA_SLACK_BYTES if on_cuda else SLACK_BYTES
    return max(before, math.ceil(held + slack + needed(fullest))), fullest


def _refuse(peak: Peak, allowed: int, forced: bool, what: str, flag: str) -> None:
    """Say that a bound does not hold and what helps: as an error if the user set it, else as a warning."""
    needed, stage = peak
    if needed <= allowed:
        return
    knobs = stage.knobs()
    lower = f"change {' or '.join(knobs)}, or " if knobs else ""
    need = f"The run needs {gibibytes(needed)} of {what} for {stage.name}"
    if forced:
        raise MemoryLimitError(
            f"{need}, more than the {gibibytes(allowed)} of {flag}; {lower}allow at least {flag} "
            f"{math.ceil(needed * 1.01 / 2**20)}MiB."
        )
    logger.warning("%s and %s is free; %sfree some.", need, gibibytes(allowed), lower)
