"""The footprint of the conversion of a GGUF file, predicted before it begins."""

import math
from dataclasses import replace

from oneshot.checkpoint import GgufCheckpoint
from oneshot.checkpoint.gguf import SHARD_BYTES
from oneshot.config import MachineOptions
from oneshot.errors import MemoryLimitError
from oneshot.footprint.bounds import Bounds
from oneshot.footprint.disk import refuse_full_disk
from oneshot.footprint.terms import DEQUANTISED
from oneshot.report.records import Footprint
from oneshot.report.words import gibibytes


def conversion_bytes(gguf: GgufCheckpoint) -> int:
    """Return the host memory that the conversion takes."""
    largest = 4 * max(math.prod(shape) for shape in gguf.shapes.values())
    return round(gguf.file_bytes + max(largest, min(gguf.num_bytes, SHARD_BYTES)) + DEQUANTISED * largest)


def refuse_conversion(checkpoint: str, gguf: GgufCheckpoint, options: MachineOptions, bounds: Bounds) -> None:
    """Raise `MemoryLimitError` if the conversion takes more than is allowed."""
    needed = bounds.host_held + conversion_bytes(gguf)
    if bounds.host_forced and needed > bounds.host_allowed:
        raise MemoryLimitError(
            f"Converting {checkpoint} takes {gibibytes(needed)} of host memory, more than the "
            f"{gibibytes(bounds.host_allowed)} of --max-memory; give a folder of safetensors, or allow at least "
            f"--max-memory {math.ceil(needed * 1.01 / 2**20)}MiB."
        )
    refuse_full_disk(options, bounds.scratch_free, gguf.num_bytes)


def with_conversion(footprint: Footprint, gguf: GgufCheckpoint | None) -> Footprint:
    """Return the prediction with the conversion of a GGUF file, which comes first; unchanged without a gguf."""
    if gguf is None:
        return footprint
    import psutil

    converting = psutil.Process().memory_info().rss + conversion_bytes(gguf)
    scratch_bytes = footprint.scratch_bytes + gguf.num_bytes
    if converting <= footprint.host_bytes:
        return replace(footprint, scratch_bytes=scratch_bytes)
    return replace(footprint, host_bytes=converting, host_stage="converting the GGUF file", scratch_bytes=scratch_bytes)
