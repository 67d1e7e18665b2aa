"""The memory that a run may take, and where its activations are stored: the one place that decides both."""

import logging
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from oneshot_kernels import cholesky_pivots_

from oneshot.checkpoint import Model
from oneshot.config import MachineOptions
from oneshot.errors import ConfigError, MemoryLimitError
from oneshot.footprint.disk import scaffold_bytes
from oneshot.footprint.expert_memory import group_sizes, num_groups
from oneshot.footprint.memory import (
    CUDA_SLACK_BYTES,
    DEVICE_SLACK_BYTES,
    HEAP_SHARE,
    SLACK_BYTES,
    scratch_bytes,
    stages,
    stages_of_layers,
    stages_outside_layers,
)
from oneshot.footprint.rates import measure_rates
from oneshot.footprint.seconds import check_seconds, own_text_seconds, predicted_seconds
from oneshot.footprint.terms import Stage
from oneshot.footprint.work import Work
from oneshot.machine import Machine, Store
from oneshot.machine.memory import peak_bytes, peak_device_bytes, pinned_bytes
from oneshot.report.records import Footprint
from oneshot.report.terminal import gibibytes
from oneshot.stream import LayerBuilder
from oneshot.text import TABLES, ending_of, file_of, split_sources

logger = logging.getLogger(__name__)

DEVICE_SHARE = 0.9  # of a device's free memory: its allocator leaves gaps


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
    tried = list[_Way]()
    for way in _ways(work, bounds):
        if way.fits(bounds):
            break
        tried.append(way)
    else:  # the last needs the least
        way = next(one for one in tried if (one.host, one.device) == (way.host, way.device))
        _refuse((way.host, bounds.host_allowed, bounds.host_forced), way.host_stage, "host memory", "--max-memory")
        _refuse(
            (way.device, bounds.device_allowed, bounds.device_forced), way.device_stage, "memory", "--max-device-memory"
        )
    work, store = way.work, way.store
    rates = measure_rates(work.device, work.dtype) if measure_time else None
    seconds = {} if rates is None else predicted_seconds(work, rates, store)
    text_seconds = 0.0 if rates is None else own_text_seconds(work, rates)
    checked = [
        max(_peak(work, [stage], store, bounds, computed=computed)[0] for stage in check) if check else 0
        for computed in (False, True)
    ]
    offloaded = max(sum(stage.stores(work)) for stage in stages(work)) if store == "disk" else 0
    refuse_full_disk(options, bounds, scratch_bytes(work) + offloaded)
    return Footprint(
        host_bytes=way.host,
        host_stage=way.host_stage.name,
        device_bytes=way.device,
        device_stage=way.device_stage.name if way.device else "",
        store=store,
        experts_together=work.machine.experts_together,
        expert_groups=num_groups(work),
        result_bytes=result_bytes,
        disk_bytes=result_bytes + beside_bytes + scaffold_bytes(work),
        scratch_bytes=scratch_bytes(work) + offloaded,
        stored_parameters={"dense": stored, "compressed": compressed},
        seconds=seconds,
        exact=work.exact,
        check_bytes=checked[0],
        check_device_bytes=checked[1],
        check_fits=checked[0] <= bounds.host_allowed and checked[1] <= bounds.device_allowed,
        check_seconds=check_seconds(work, rates) if rates is not None and check else 0.0,
        text_seconds=text_seconds,
        dtype=dtype,
    )


def fits(work: Work, bounds: Bounds) -> bool:
    """Return whether a run stays within the bounds in any way."""
    return any(way.fits(bounds) for way in _ways(work, bounds))


def offload_folder(options: MachineOptions) -> Path:
    """Return the folder of scratch files. Raises `ConfigError` if the named folder does not exist."""
    folder = Path(tempfile.gettempdir() if options.offload_dir is None else options.offload_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--offload-dir {folder} is not a folder; create it or name another.")
    return folder


def refuse_full_disk(options: MachineOptions, bounds: Bounds, needed: int) -> None:
    """Raise `MemoryLimitError` if the off-load folder has less room than needed."""
    free = bounds.scratch_free
    if free < needed:
        raise MemoryLimitError(
            f"{offload_folder(options)} has {gibibytes(free)} free and the run puts {gibibytes(needed)} there; name a "
            "folder with more room as --offload-dir, give more --max-memory, or lower --num-sequences."
        )


@dataclass(frozen=True)
class _Way:
    """State the peaks of a run, and their stages, by where activations are and how experts are grouped (`work`)."""

    work: Work
    store: Store
    host: int
    host_stage: Stage
    device: int
    device_stage: Stage

    def fits(self, bounds: Bounds) -> bool:
        return self.host <= bounds.host_allowed and self.device <= bounds.device_allowed


def _ways(work: Work, bounds: Bounds) -> Iterator[_Way]:
    """Yield the ways of a run, the fastest first, and at last the one that needs the least.

    More groups of experts need less memory and more passes over the text. A pass takes a device less time than
    activations on disk, and a CPU more.
    """
    outside, on_cuda = stages_outside_layers(work), work.device.type == "cuda"
    stores: tuple[Store, ...] = ("device", "host", "disk") if on_cuda else ("host", "disk")
    for alike in (stores[:-1], stores[-1:]) if on_cuda else (stores,):
        for together in group_sizes(work):
            grouped = replace(work, machine=replace(work.machine, experts_together=together))
            listed = outside + stages_of_layers(grouped)
            for store in alike:
                peaks = [_peak(grouped, listed, store, bounds, computed=computed) for computed in (False, True)]
                yield _Way(grouped, store, *peaks[0], *peaks[1])


def _peak(work: Work, listed: list[Stage], store: Store, bounds: Bounds, *, computed: bool) -> tuple[int, Stage]:
    """Return the peak on the host or on the device (`computed`), and its stage."""
    on_cuda = work.device.type == "cuda"
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


def _refuse(amounts: tuple[int, int, bool], stage: Stage, what: str, flag: str) -> None:
    """Say that a bound does not hold and what helps: as an error if the user set it, else as a warning."""
    needed, allowed, forced = amounts
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
