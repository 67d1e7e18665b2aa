"""Settings of torch that belong to the caller's process, and must not decide what a run computes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from oneshot.machine.device import exact_products
from oneshot.machine.shared import shared_by_threads

ATTENTION = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)  # all of them, as torch starts


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
