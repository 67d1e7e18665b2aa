"""Gram and cross-Gram accumulation."""

from __future__ import annotations

import torch

from oneshot_kernels import backend


def gram_(out: torch.Tensor, rows: torch.Tensor, *, row_weights: torch.Tensor | None = None) -> torch.Tensor:
    """In place: out += rowsᵀ diag(w) rows, the Gram of a stream of row blocks.

    out          [n, n] fp32 or fp64, symmetric (zeros, or a Gram): the accumulator; products and sums have its dtype.
    rows         [m, n] bf16, fp16, fp32 or fp64, any strides.
    row_weights  [m] (None: ones), any sign; the weight of a row, not its square root.
    Returns `out`. Additive over row blocks, to rounding. Column weights need no pass over the data: diag(c) G diag(c),
    see `scale_columns`.
    Raises ValueError for shapes and dtypes that do not fit, `KernelError` as `oneshot_kernels.backend` says.
    Cost m n² flops where only the upper block triangle is computed (n >= 1024), 2 m n² below. Deterministic on one
    machine with one thread count.
    """
    _check(out, rows, rows, row_weights)
    if rows.numel() > 0:
        backend.run("gram", "gram_", rows, out, rows, row_weights)
    return out


def cross_gram_(
    out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, *, row_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """In place: out += rowsᵀ diag(w) targets; out [n, p], rows [m, n], targets [m, p]. Otherwise as `gram_`.

    Cost 2 m n p flops.
    """
    _check(out, rows, targets, row_weights)
    if rows.numel() > 0 and targets.numel() > 0:
        backend.run("gram", "cross_gram_", rows, out, rows, targets, row_weights)
    return out


def scale_columns(gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """diag(c) G diag(c), the Gram of A diag(c) (STAT A.3: output-weighted columns); gram [n, n], weights [n]."""
    scale = weights.to(gram.dtype)
    return gram * scale.unsqueeze(1) * scale


def _check(out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, row_weights: torch.Tensor | None) -> None:
    if rows.ndim != 2 or targets.ndim != 2 or rows.shape[0] != targets.shape[0]:
        raise ValueError(f"rows [m, n] and targets [m, p] differ: {tuple(rows.shape)} and {tuple(targets.shape)}")
    if out.shape != (rows.shape[1], targets.shape[1]):
        raise ValueError(f"out is {tuple(out.shape)}, expected {(rows.shape[1], targets.shape[1])}")
    if out.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"out must be fp32 or fp64, got {out.dtype}")
    if not (rows.is_floating_point() and targets.is_floating_point()):
        raise ValueError(f"rows and targets must be floating, got {rows.dtype} and {targets.dtype}")
    if row_weights is not None and row_weights.shape != rows.shape[:1]:
        raise ValueError(f"row_weights is {tuple(row_weights.shape)}, expected {tuple(rows.shape[:1])}")
