"""Interpolation matrices and trailing errors: from a factor, from the data.

All solve  min_T ‖A - A[:, J] T‖_F  for a skeleton J of k columns (STAT §2; Cheng, Gimbutas, Martinsson, Rokhlin 2005,
doi:10.1137/030602678) and return the interpolation matrix T [k, n] with T[:, J] = I exactly.
"""

from __future__ import annotations

import torch

from oneshot_kernels.pivoted_qr.factor import PivotedFactor


def interpolation_matrix(factor: PivotedFactor, rank: int) -> torch.Tensor:
    """Return T = [I, R11⁻¹ R12] Πᵀ of the first `rank` pivots: T[:, pivots[:rank]] == I, A ≈ A[:, pivots[:rank]] @ T.

    Returns [rank, n] in the factor's dtype. Skeleton columns beyond `factor.factorised_rank` (they are combinations of
    earlier ones, to rounding) get zero rows outside their own column. Raises ValueError for a rank outside [0, n].
    Cost rank² (n - rank) flops. max|T| can grow where the pivots are poor: see `strong_rrqr_swaps`.
    """
    if not 0 <= rank <= factor.pivots.numel():
        raise ValueError(f"rank {rank} is outside [0, {factor.pivots.numel()}]")
    num_columns = factor.pivots.numel()
    solved = min(rank, factor.factorised_rank)
    matrix = factor.r.new_zeros(rank, num_columns)
    r11, r12 = factor.r[:solved, :solved], factor.r[:solved, rank:]
    matrix[:solved, factor.pivots[rank:]] = torch.linalg.solve_triangular(r11, r12, upper=True)
    matrix[torch.arange(rank, device=matrix.device), factor.pivots[:rank]] = 1
    return matrix


def interpolation_from_data(matrix: torch.Tensor, skeleton: torch.Tensor) -> torch.Tensor:
    """Return T = A[:, J]⁺ A by Householder QR of A[:, J] (its condition number is not squared).

    matrix [m, n] fp32 or fp64 with m >= k, skeleton int64[k] of full numerical rank (else ValueError).
    Cost 2 m k² + 2 m k n flops.
    """
    q, r = torch.linalg.qr(matrix[:, skeleton])
    diagonal = r.diagonal().abs()
    if r.shape[0] < skeleton.numel() or bool((diagonal <= torch.finfo(r.dtype).eps * diagonal.max()).any()):
        raise ValueError("the skeleton's columns are linearly dependent to rounding")
    return _with_identity(torch.linalg.solve_triangular(r, q.mT @ matrix, upper=True), skeleton)


def trailing_error_from_data(matrix: torch.Tensor, interpolation: torch.Tensor, skeleton: torch.Tensor) -> float:
    """Return ‖A - A[:, J] T‖_F, the residual itself: accurate to eps ‖A‖_F, needs the data. Cost 2 m k n flops."""
    residual = torch.addmm(matrix, matrix[:, skeleton], interpolation, alpha=-1)
    return float(torch.linalg.vector_norm(residual, dtype=torch.float64))


def _with_identity(matrix: torch.Tensor, skeleton: torch.Tensor) -> torch.Tensor:
    matrix[:, skeleton] = torch.eye(skeleton.numel(), dtype=matrix.dtype, device=matrix.device)
    return matrix
