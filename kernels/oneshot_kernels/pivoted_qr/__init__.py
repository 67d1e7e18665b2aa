"""Column-pivoted factorisations behind one record: pivots, the error of every rank, and R."""

from __future__ import annotations

from typing import Literal

import torch

from oneshot_kernels.backend import choose_backend
from oneshot_kernels.pivoted_qr import reference
from oneshot_kernels.pivoted_qr.factor import PivotedFactor, empty_factor
from oneshot_kernels.pivoted_qr.lapack import lapack_pivoted_qr
from oneshot_kernels.pivoted_qr.randomized import bqrrp

Method = Literal["lapack", "randomized"]


def pivoted_qr(
    matrix: torch.Tensor, *, method: Method = "randomized", rank: int | None = None, seed: int = 0
) -> PivotedFactor:
    """Factorise A[:, pivots] = Q R from the matrix itself (its condition number is not squared).

    matrix  [m, n] fp32 or fp64, any m and n.
    method  "lapack": Businger–Golub by `geqp3`, fp64, CPU; the reference, slow.
            "randomized": BQRRP, blocks of pivots from a small sketch, any device; accurate to eps ‖A‖.
    rank    stop after this many pivots (None: min(m, n)).
    seed    of the sketch; the result is a function of (matrix, method, rank, seed) on one machine.
    ONESHOT_KERNELS=reference runs NumPy whatever the method. There is no Triton version: the work is in GEMMs.
    Raises ValueError for a matrix that is not finite, an unknown method, or a rank outside [0, min(m, n)].
    """
    if matrix.ndim != 2 or matrix.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"expected a matrix in fp32 or fp64, got {tuple(matrix.shape)} {matrix.dtype}")
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("the matrix has entries that are not finite")
    full = min(matrix.shape)
    if rank is not None and not 0 <= rank <= full:
        raise ValueError(f"rank {rank} is outside [0, {full}]")
    rank = full if rank is None else rank
    if not bool(matrix.any()):
        return empty_factor(matrix.shape[1], matrix.dtype, matrix.device)
    if choose_backend(matrix) == "reference":
        return reference.pivoted_qr(matrix, rank)
    if method == "lapack":
        return lapack_pivoted_qr(matrix, rank)
    if method == "randomized":
        return bqrrp(matrix, rank, seed)
    raise ValueError(f"unknown method {method!r}: lapack or randomized")
