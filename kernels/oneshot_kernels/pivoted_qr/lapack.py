"""Businger–Golub column-pivoted QR by LAPACK: the baseline that the others are held against."""

from __future__ import annotations

import scipy.linalg
import torch

from oneshot_kernels.pivoted_qr.factor import PivotedFactor, suffix_sums

EPS = torch.finfo(torch.float64).eps


def lapack_pivoted_qr(matrix: torch.Tensor, rank: int) -> PivotedFactor:
    """Factorise A[:, pivots] = Q r by `geqp3` (Businger & Golub 1965, doi:10.1007/BF01436084), CPU, fp64.

    Every column is factorised, so every trailing error is exact; `r` keeps the rows up to `rank` or to the numerical
    rank (|r_kk| > eps · max(m, n) · |r_00|), whichever is smaller.
    Cost 4 m n² - 4 n³/3 flops (m >= n), half of it BLAS-2: bound by memory.
    """
    # scipy keeps Q's m rows in mode "r" when m > n: cut the zeros off.
    full, pivots = scipy.linalg.qr(matrix.double().cpu().numpy(), mode="r", pivoting=True)
    r = torch.from_numpy(full[: min(matrix.shape)])
    squares = suffix_sums(r.square().sum(dim=1))
    errors = squares.new_zeros(matrix.shape[1] + 1)
    errors[: squares.numel()] = squares.sqrt()
    diagonal = r.diagonal().abs()
    numerical_rank = int((diagonal > EPS * max(matrix.shape) * diagonal[0]).sum())
    rank, device = min(rank, numerical_rank), matrix.device
    return PivotedFactor(torch.from_numpy(pivots.astype("int64")).to(device), errors.to(device), r[:rank].to(device))
