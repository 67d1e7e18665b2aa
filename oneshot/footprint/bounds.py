"""Whether a run may take what it needs, and where its activations live for that: the one place that decides both."""

import logging
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from oneshot_kernels import cholesky_pivots_

from oneshot.calibration import split_sources
from oneshot.config import CompressionConfig
from oneshot.errors import ConfigError, MemoryLimitError
from oneshot.footprint.memory import DEVICE_SLACK_BYTES, HEAP_SHARE, SLACK_BYTES, Stage, scratch_bytes, stages
from oneshot.footprint.seconds import measure_rates, predicted_seconds
from oneshot.footprint.work import Work
from oneshot.records import Footprint
from oneshot.report import gibibytes, peak_bytes, peak_device_bytes
from oneshot.source import SourceModel
from oneshot.stream import LayerStream

logger = logging.getLogger(__name__)

DEVICE_SHARE = 0.9  # of a device's free memory: its allocator leaves gaps
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")  # texts that datasets reads


@dataclass(frozen=True)
class Bounds:
    """Bytes that a run starts from and those it may reach, on the host and on the device.

    `held` are those of the process now, `peak` the most it ever had; `forced` says that the user set the limit.
    """

    host_held: int
    host_peak: int
    host_allowed: int
    host_forced: bool
    device_held: int
    device_peak: int
    device_allowed: int
    device_forced: bool


def current_bounds(config: CompressionConfig, device: torch.device) -> Bounds:
    """The bounds of a run in this process: what the user allows, or else what is free now."""
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
        host_allowed=config.max_memory_bytes or held + psutil.virtual_memory().available,
        host_forced=config.max_memory_bytes is not None,
        device_held=device_held,
        device_peak=peak_device_bytes(),
        device_allowed=config.max_device_memory_bytes or device_held + device_free,
        device_forced=config.max_device_memory_bytes is not None,
    )


def load_libraries(source: SourceModel, config: CompressionConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Have in memory what the run will load: libraries, the family's model class, the workspaces of BLAS."""
    LayerStream(source.checkpoint.config, source.architecture, sequence_length=2, device=device, dtype=dtype)
    if any(Path(source).suffix in FILE_SUFFIXES for source in split_sources(config.calibration)):
        import datasets  # noqa: F401
    for each in {dtype, torch.float32, torch.float64}:
        square = torch.eye(64, dtype=each, device=device)
        square @ square
    torch.linalg.cholesky(square.double())
    cholesky_pivots_(square.double(), rank=64)


def predict_footprint(work: Work, bounds: Bounds, *, result_bytes: int, measure_time: bool) -> Footprint:
    """What a run will take, its activations where everything fits: on the device, else on the host, else on disk.

    Raises `MemoryLimitError` where a bound that the user set does not hold even with activations on disk, or the disk
    of `--offload-dir` is too small; warns where what is free now does not suffice.
    """
    found = stages(work)
    stored = work.shape.stack().stored_parameters()
    compressed = stored if work.plan is None else work.plan.stack(work.shape).stored_parameters()
    seconds = predicted_seconds(work, measure_rates(work.device, work.dtype)) if measure_time else {}
    tiers = ("device", "host", "disk") if work.device.type == "cuda" else ("host", "disk")
    for tier in tiers:
        host, host_stage = _peak(work, found, tier, bounds, computed=False)
        device, device_stage = _peak(work, found, tier, bounds, computed=True)
        if host <= bounds.host_allowed and device <= bounds.device_allowed:
            break
    else:
        _refuse((host, bounds.host_allowed, bounds.host_forced), host_stage, "host memory", "--max-memory")
        _refuse((device, bounds.device_allowed, bounds.device_forced), device_stage, "memory", "--max-device-memory")
    offloaded = sum(work.store_bytes) if tier == "disk" else 0
    refuse_full_disk(work.config, scratch_bytes(work) + offloaded)
    return Footprint(
        host_bytes=host,
        host_stage=host_stage.name,
        device_bytes=device,
        device_stage=device_stage.name if device else "",
        tier=tier,
        result_bytes=result_bytes,
        scratch_bytes=scratch_bytes(work) + offloaded,
        stored_parameters={"dense": stored, "compressed": compressed},
        seconds=seconds,
        exact=work.exact,
    )


def offload_folder(config: CompressionConfig) -> Path:
    """Where scratch files go. Raises `ConfigError` where a folder was named that is not there."""
    folder = Path(tempfile.gettempdir() if config.offload_dir is None else config.offload_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--offload-dir {folder} is no folder; create it or name another.")
    return folder


def refuse_full_disk(config: CompressionConfig, needed: int) -> None:
    """Raise `MemoryLimitError` where the off-load folder has less room than needed."""
    folder = offload_folder(config)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MemoryLimitError(
            f"{folder} has {gibibytes(free)} free and the run puts {gibibytes(needed)} there; name a folder with more "
            "room as --offload-dir, give more --max-memory, or lower --num-sequences."
        )


def _peak(work: Work, found: list[Stage], tier: str, bounds: Bounds, *, computed: bool) -> tuple[int, Stage]:
    """The peak on the host or on the device (`computed`), and its stage."""
    on_cuda = work.device.type == "cuda"
    if computed and not on_cuda:
        return 0, found[0]

    def needed(stage: Stage) -> float:
        size = stage.total(computed=computed)
        if not on_cuda:
            size += stage.total(computed=True)
        return size * (1.0 if computed else HEAP_SHARE)

    fullest = max(found, key=needed)
    stores = 0
    if tier == ("device" if computed else "host"):
        pinned = on_cuda and not computed
        stores = sum(_pinned(size) if pinned else size for size in work.store_bytes)
    held, before = (bounds.device_held, bounds.device_peak) if computed else (bounds.host_held, bounds.host_peak)
    slack = DEVICE_SLACK_BYTES if computed else SLACK_BYTES
    return max(before, math.ceil(held + slack + stores + needed(fullest))), fullest


def _pinned(size: int) -> int:
    """Bytes that torch takes for pinned memory: the next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _refuse(amounts: tuple[int, int, bool], stage: Stage, what: str, flag: str) -> None:
    """Where a bound does not hold, say so and what would help: as an error where the user set it, else as a warning."""
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
