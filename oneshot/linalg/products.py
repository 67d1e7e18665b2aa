"""Products in float32 at the full width of the CPU."""

from functools import cache

import torch
from torch.nn import functional

MULTIPLE = 64  # of every size; oneDNN compiles and keeps a product for every shape, which takes a megabyte


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x (…, n) @ weightᵀ (n, p)` in float32, on the device of both.

    torch multiplies float32 by MKL, which takes half the width of AVX-512 on AMD's CPUs; oneDNN takes all of it.
    """
    return _by_onednn(x, weight) if _takes_onednn(x, weight) else functional.linear(x, weight)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left (…, m, n) @ right (…, n, p)`; as `linear`, but oneDNN gets copies of factors that it cannot read."""
    return _by_onednn(left, right.mT) if _takes_onednn(left, right.mT) else left @ right


def rounded_product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `left (m, n) @ right (n, p)` in this dtype.

    Where it has 16 bits, float32 multiplies, whose rounding is far smaller; otherwise the dtype of `right` does.
    """
    precision = torch.float32 if dtype.itemsize == 2 else right.dtype
    return product(left.to(precision), right.to(precision)).to(dtype)


def _takes_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.ndim != 2 or not mkl_is_narrow():
        return False
    with_graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)  # oneDNN's has no derivative
    return x.numel() > 0 and not any(size % MULTIPLE for size in (*x.shape, len(weight))) and not with_graph


def _by_onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x @ weightᵀ` by the operator that torch's compiler takes; it makes the products that float32 makes."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight.contiguous(), None, "none", [], "")
    return found


@cache
def mkl_is_narrow() -> bool:
    """Return whether the CPU is AMD's, with AVX-512, and torch has both libraries and the operator of oneDNN."""
    capabilities = torch.cpu.get_capabilities()
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    has_operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # it is private to torch
    return (
        has_both
        and has_operator
        and "AMD" in str(capabilities.get("cpu_name", ""))
        and bool(capabilities.get("avx512_f", False))
    )
