"""What the conversion of a GGUF file takes, before it begins."""

import math
from dataclasses import replace

from oneshot.checkpoint import GgufHeader
from oneshot.config import MachineOptions
from oneshot.errors import MemoryLimitError
from oneshot.footprint.bounds import Bounds, refuse_full_disk
from oneshot.report.records import Footprint
from oneshot.report.terminal import gibibytes

CONVERTED_SHARE = 2.0  # of the float32 weights: the model, and the buffers it is read and written through


def conversion_bytes(header: GgufHeader) -> int:
    """Return the host memory that the conversion takes."""
    return round(CONVERTED_SHARE * header.num_bytes)


def refuse_conversion(checkpoint: str, header: GgufHeader, options: MachineOptions, bounds: Bounds) -> None:
    """Raise `MemoryLimitError` if the whole model, which a conversion holds, is more than is allowed."""
    needed = bounds.host_held + conversion_bytes(header)
    if bounds.host_forced and needed > bounds.host_allowed:
        raise MemoryLimitError(
            f"Converting {checkpoint} takes {gibibytes(needed)} of host memory, more than the "
            f"{gibibytes(bounds.host_allowed)} of --max-memory; give a folder of safetensors, or allow at least "
            f"--max-memory {math.ceil(needed * 1.01 / 2**20)}MiB."
        )
    refuse_full_disk(options, header.num_bytes)


def with_conversion(footprint: Footprint, header: GgufHeader | None) -> Footprint:
    """Return the prediction with the conversion of a GGUF file, which comes first; unchanged without a header."""
    if header is None:
        return footprint
    import psutil

    converting = psutil.Process().memory_info().rss + conversion_bytes(header)
    scratch_bytes = footprint.scratch_bytes + header.num_bytes
    if converting <= footprint.host_bytes:
        return replace(footprint, scratch_bytes=scratch_bytes)
    return replace(footprint, host_bytes=converting, host_stage="converting the GGUF file", scratch_bytes=scratch_bytes)
