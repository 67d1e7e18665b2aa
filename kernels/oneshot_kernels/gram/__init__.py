"""Gram and cross-Gram accumulation."""

from __future__ import annotations

import torch

from oneshot_kernels import backend


def gram_(out: torch.Tensor, rows: torch.Tensor, *, mirror: bool = True) -> torch.Tensor:
    """Add rowsᵀ rows to `out` in place: the Gram of a stream of row blocks.

    out     [n, n] fp32 or fp64, symmetric (zeros, or a Gram): the accumulator; sums have its dtype.
    rows    [m, n] bf16, fp16, fp32 or fp64, any strides.
    mirror  False leaves what is below the diagonal to one `mirror_` after the last block. Until then it is undefined.
    Returns `out`. Additive over row blocks, to rounding. Column weights need no pass over the data: diag(c) G diag(c).
    Raises ValueError for shapes and dtypes that do not fit, `KernelError` as `oneshot_kernels.backend` says.
    Cost m n² flops where only the upper block triangle is computed (n >= 1024), 2 m n² below. Deterministic on one
    machine with one thread count.
    """
    _check(out, rows, rows)
    if rows.numel() > 0:
        backend.run("gram", "gram_", rows, out, rows)
        if mirror:
            mirror_(out)
    return out


def mirror_(out: torch.Tensor) -> torch.Tensor:
    """Complete a Gram that was summed by `gram_(…, mirror=False)`, in place: what is missing is copied from above.

    out  [n, n] fp32 or fp64. Once more changes nothing. Returns `out`.
    Raises ValueError where `out` is not square. One pass over half of `out`.
    """
    if out.ndim != 2 or out.shape[0] != out.shape[1]:
        raise ValueError(f"a Gram matrix is square, got shape {tuple(out.shape)}")
    if out.numel() > 0:
        backend.run("gram", "mirror_", out, out)
    return out


def cross_gram_(out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Add rowsᵀ targets to `out` in place; out [n, p], rows [m, n], targets [m, p]. Otherwise as `gram_`.

    Cost 2 m n p flops.
    """
    _check(out, rows, targets)
    if rows.numel() > 0 and targets.numel() > 0:
        backend.run("gram", "cross_gram_", rows, out, rows, targets)
    return out


def _check(out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> None:
    if rows.ndim != 2 or targets.ndim != 2 or rows.shape[0] != targets.shape[0]:
        raise ValueError(f"rows [m, n] and targets [m, p] differ: {tuple(rows.shape)} and {tuple(targets.shape)}")
    if out.shape != (rows.shape[1], targets.shape[1]):
        raise ValueError(f"out is {tuple(out.shape)}, expected {(rows.shape[1], targets.shape[1])}")
    if out.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"out must be fp32 or fp64, got {out.dtype}")
    if not (rows.is_floating_point() and targets.is_floating_point()):
        raise ValueError(f"rows and targets must be floating, got {rows.dtype} and {targets.dtype}")
