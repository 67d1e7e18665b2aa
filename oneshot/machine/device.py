"""The `--device` option as torch's own objects, and torch's settings: a run's own, which the caller gets back."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from oneshot.errors import DeviceError
from oneshot.machine.shared import shared_by_threads

FULL_MEMORY = 1.0
ATTENTION = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)  # all of them, as torch starts


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device of a name, with its number; `auto` is CUDA if torch sees a CUDA device.

    Args:
        local_rank: rank of this process on its machine; each process takes a device of its own.

    Raises `DeviceError` if the device is not there.
    """
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{torch.cuda.current_device() if local_rank is None else local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"--device {name} is not understood; use cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name} is not supported; use cpu or cuda.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise DeviceError(
            f"--device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices; use --device cpu."
        )
    return device


@shared_by_threads
@contextmanager
def exact_products() -> Iterator[None]:
    """Let float32 products be float32; NVIDIA's containers make them TF32, which has 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def vendor_solvers(device: torch.device) -> Iterator[None]:
    """Let a CUDA device factorise by cuSOLVER; torch gives LU of tall matrices to MAGMA, which warns and is slower.

    The library is a setting of the whole process, so it is what it was before when the block ends.
    """
    if device.type != "cuda":
        yield
        return
    with _cusolver():
        yield


@shared_by_threads
@contextmanager
def _cusolver() -> Iterator[None]:
    before = torch.backends.cuda.preferred_linalg_library()
    torch.backends.cuda.preferred_linalg_library("cusolver")  # torch warns once that the setting is experimental
    try:
        yield
    finally:
        torch.backends.cuda.preferred_linalg_library(before)


@contextmanager
def repeatable_attention(device: torch.device) -> Iterator[None]:
    """Let attention on a CUDA device be products and a softmax, which have gradients that add up in a fixed order.

    Gradients of fused kernels add up in any order, so two runs would differ.
    """
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def limited_memory(device: torch.device, num_bytes: int | None) -> Iterator[None]:
    """Let torch take at most so many bytes of a CUDA device; None is no limit."""
    if device.type != "cuda" or num_bytes is None:
        yield
        return
    share = num_bytes / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(FULL_MEMORY, share), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(FULL_MEMORY, device)


@contextmanager
def usual_settings() -> Iterator[None]:
    """Let torch have the settings that it starts with; the caller's are back when the block ends.

    These are the default dtype and device, autocast, deterministic mode, the precision of float32 products and the
    choice of attention. The number of threads stays the caller's. Grad modes are set where they matter.
    """
    with _usual_process(), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@shared_by_threads
@contextmanager
def _usual_process() -> Iterator[None]:
    """Change what the threads of a process have in common."""
    cuda = torch.backends.cuda
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(False)
        stack.enter_context(exact_products())
        enabled = cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled
        if not all(is_enabled() for is_enabled in enabled):
            stack.enter_context(sdpa_kernel([*ATTENTION]))
        yield
