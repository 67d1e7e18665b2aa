"""Gram accumulation in torch: GEMMs of the upper block triangle, mirrored at the end."""

from __future__ import annotations

import torch

# Measured on a CPU: below MINIMUM_COLUMNS one plain GEMM is as fast or faster.
PANEL_WIDTH = 512
MINIMUM_COLUMNS = 1024
# On a device a panel is twice as wide, so that its GEMMs have tiles for every multiprocessor.
DEVICE_PANEL_WIDTH = 1024

HALF = (torch.bfloat16, torch.float16)


def gram_(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rowsᵀ rows to `out`: each panel of columns times the columns from its own first one on."""
    if not multiplies_halves(out, rows, rows):
        rows = rows.to(out.dtype)
    for start, stop in panels(out):
        add_product_(out[start:stop, start:], rows[:, start:stop], rows[:, start:])


def mirror_(out: torch.Tensor) -> None:
    """Copy to the left of each panel's diagonal block what is above it."""
    for start, stop in panels(out):
        out[stop:, start:stop] = out[start:stop, stop:].mT


def cross_gram_(out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> None:
    """Add rowsᵀ targets to `out`: one GEMM."""
    if not multiplies_halves(out, rows, targets):
        rows, targets = rows.to(out.dtype), targets.to(out.dtype)
    add_product_(out, rows, targets)


def panels(out: torch.Tensor) -> list[tuple[int, int]]:
    """Return the (first, last + 1) columns of the panels that `out` [n, n] is summed in."""
    num_columns = out.shape[0]
    width = DEVICE_PANEL_WIDTH if out.is_cuda else PANEL_WIDTH
    if num_columns < MINIMUM_COLUMNS:
        width = num_columns
    return [(start, min(start + width, num_columns)) for start in range(0, num_columns, width)]


def multiplies_halves(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether `add_product_` takes these rows as they are: bf16 or fp16 summed in fp32, on CUDA.

    A product of two such numbers is exact in fp32, so nothing is lost against fp32 rows, at the speed of tensor cores.
    """
    return out.is_cuda and out.dtype == torch.float32 and left.dtype == right.dtype and left.dtype in HALF


def add_product_(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add leftᵀ right to `out`, in place and without a temporary."""
    if left.dtype == out.dtype:
        out.addmm_(left.mT, right)
    else:
        torch.addmm(out, left.mT, right, out_dtype=out.dtype, out=out)
