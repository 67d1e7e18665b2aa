"""Grams in NumPy, fp64: the definition."""

from __future__ import annotations

import numpy as np
import torch


def gram_(out: torch.Tensor, rows: torch.Tensor, row_weights: torch.Tensor | None) -> None:
    """out += rowsᵀ diag(w) rows."""
    cross_gram_(out, rows, rows, row_weights)


def cross_gram_(out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, row_weights: torch.Tensor | None) -> None:
    """out += rowsᵀ diag(w) targets."""
    left, right = rows.double().cpu().numpy(), targets.double().cpu().numpy()
    weights = np.ones(rows.shape[0]) if row_weights is None else row_weights.double().cpu().numpy()
    out += torch.from_numpy(np.einsum("mi,m,mj->ij", left, weights, right, optimize=True)).to(out)
