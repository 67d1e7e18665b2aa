"""Grams in NumPy, fp64: the definition."""

from __future__ import annotations

import numpy as np
import torch


def gram_(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rowsᵀ rows to all of `out`."""
    cross_gram_(out, rows, rows)


def mirror_(out: torch.Tensor) -> None:
    """Do nothing: `gram_` has left nothing out."""


def cross_gram_(out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> None:
    """Add rowsᵀ targets to `out`."""
    left, right = rows.double().cpu().numpy(), targets.double().cpu().numpy()
    out += torch.from_numpy(np.einsum("mi,mj->ij", left, right, optimize=True)).to(out)
