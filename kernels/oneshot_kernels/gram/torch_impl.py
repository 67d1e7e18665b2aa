"""Gram accumulation in torch: GEMMs of the upper block triangle, mirrored."""

from __future__ import annotations

import torch

# From benchmarks/kernels.py: below MINIMUM_COLUMNS one plain GEMM is as fast or faster.
PANEL_WIDTH = 512
MINIMUM_COLUMNS = 1024


def gram_(out: torch.Tensor, rows: torch.Tensor, row_weights: torch.Tensor | None) -> None:
    """out += rowsᵀ diag(w) rows: each panel of columns times the columns from its own first one on.

    The part left of the panel's diagonal block is copied from above, so `out` has to be symmetric.
    """
    right = rows.to(out.dtype)
    left = right if row_weights is None else right * row_weights.to(out.dtype).unsqueeze(1)
    num_columns = rows.shape[1]
    if num_columns < MINIMUM_COLUMNS:
        out.addmm_(left.mT, right)
        return
    for start in range(0, num_columns, PANEL_WIDTH):
        stop = min(start + PANEL_WIDTH, num_columns)
        out[start:stop, start:].addmm_(left[:, start:stop].mT, right[:, start:])
        out[stop:, start:stop] = out[start:stop, stop:].mT


def cross_gram_(out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, row_weights: torch.Tensor | None) -> None:
    """out += rowsᵀ diag(w) targets: one GEMM."""
    left, right = rows.to(out.dtype), targets.to(out.dtype)
    if row_weights is not None:
        right = right * row_weights.to(out.dtype).unsqueeze(1)
    out.addmm_(left.mT, right)
