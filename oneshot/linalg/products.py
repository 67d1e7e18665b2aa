"""Products in float32 at the full width of the CPU."""

from functools import cache

import torch
from torch.nn import functional

ROWS = 64  # a whole number of so many; oneDNN compiles and keeps a product for every number of rows


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x (…, n) @ weightᵀ (n, p)` in float32, on the device of both.

    torch multiplies float32 by MKL, which takes half the width of AVX-512 on AMD's CPUs; oneDNN takes all of it.
    """
    if x.device.type != "cpu" or x.ndim != 2 or len(x) % ROWS or not mkl_is_narrow():
        return functional.linear(x, weight)
    return functional.linear(x.to_mkldnn(), weight.to_mkldnn()).to_dense()


@cache
def mkl_is_narrow() -> bool:
    """Return whether the CPU is AMD's, with AVX-512, and torch has both libraries."""
    capabilities = torch.cpu.get_capabilities()
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and "AMD" in str(capabilities.get("cpu_name", "")) and bool(capabilities.get("avx512_f", False))
