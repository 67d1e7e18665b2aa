"""Memory of the process: its peaks, and what the heap gives back."""

import ctypes
import resource
import sys
from pathlib import Path

import torch

PROCESS_STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # man 5 proc: resets VmHWM to the present resident memory


def peak_bytes() -> int:
    """Return the peak resident memory of this process.

    On Linux it is `VmHWM`, because `ru_maxrss` begins with the peak of the parent process. Elsewhere it is `ru_maxrss`.
    """
    if PROCESS_STATUS.exists():
        return int(PROCESS_STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak() -> None:
    """Forget earlier peaks, so that a run reports its own.

    A process that was forked begins with its parent's `VmHWM`, and an earlier run of the same process leaves its peak.
    Nothing happens if the system offers no reset.
    """
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:  # not Linux, or /proc is read-only: the peak then includes what came before
        return
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_device_bytes() -> int:
    """Return the peak memory that torch took on the current CUDA device; 0 without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def pinned_bytes(size: int) -> int:
    """Return the bytes that torch takes for a pinned tensor: the next power of two."""
    return 1 << max(0, size - 1).bit_length()


def device_capacity(device: torch.device, limit: int | None = None) -> int:
    """Return the bytes that a run may take of a CUDA device, whatever else is there now; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return limit or torch.cuda.mem_get_info(device)[1]


def release_heap() -> None:
    """Return freed memory to the system before a peak.

    glibc keeps freed blocks below 32 MiB, such as a layer's weights and a batch's activations. The larger matrices
    that follow cannot use them. Nothing happens if the C library has no `malloc_trim`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
