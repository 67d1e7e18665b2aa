"""Interpolation matrices and trailing errors: from a factor, from a Gram, from the data.

All solve  min_T ‖A - A[:, J] T‖_F  for a skeleton J of k columns (STAT §2; Cheng, Gimbutas, Martinsson, Rokhlin 2005,
doi:10.1137/030602678) and return the interpolation matrix T [k, n] with T[:, J] = I exactly.
"""

from __future__ import annotations

import torch

from oneshot_kernels.pivoted_qr.factor import PivotedFactor


def interpolation_matrix(factor: PivotedFactor, rank: int) -> torch.Tensor:
    """T = [I, R11⁻¹ R12] Πᵀ of the first `rank` pivots: T[:, pivots[:rank]] == I and A ≈ A[:, pivots[:rank]] @ T.

    Returns [rank, n] in the factor's dtype. Skeleton columns beyond `factor.factorised_rank` (they are combinations of
    earlier ones, to rounding) get zero rows outside their own column. Raises ValueError for a rank outside [0, n].
    Cost rank² (n - rank) flops. max|T| can grow where the pivots are poor: see `strong_rrqr_swaps`.
    """
    _check_rank(factor, rank)
    num_columns = factor.pivots.numel()
    solved = min(rank, factor.factorised_rank)
    matrix = factor.r.new_zeros(rank, num_columns)
    r11, r12 = factor.r[:solved, :solved], factor.r[:solved, rank:]
    matrix[:solved, factor.pivots[rank:]] = torch.linalg.solve_triangular(r11, r12, upper=True)
    matrix[torch.arange(rank, device=matrix.device), factor.pivots[:rank]] = 1
    return matrix


def trailing_error(factor: PivotedFactor, rank: int) -> float:
    """‖R22‖_F after `rank` pivots (entry `rank` of the curve). Raises ValueError for a rank outside [0, n]."""
    _check_rank(factor, rank)
    return float(factor.trailing_errors[rank])


def interpolation_from_gram(gram: torch.Tensor, skeleton: torch.Tensor, *, damping: float = 0.0) -> torch.Tensor:
    """T = (G[J, J] + λ I)⁻¹ G[J, :], with T[:, J] = I put in exactly, from the Gram G = AᵀA alone (STAT §3.1).

    gram [n, n] fp32 or fp64; skeleton int64[k], distinct; damping λ >= 0 (absolute: the caller scales it). Solved in
    fp64 on the CPU, in the Gram's dtype elsewhere; returns [k, n] in the Gram's dtype. With λ = 0 the condition number
    of A[:, J] is squared; raises ValueError where G[J, J] + λ I is not positive definite to rounding.
    Cost k³/3 + 2 k² n flops.
    """
    working = gram.double() if gram.device.type == "cpu" else gram
    square = working[skeleton][:, skeleton]
    square.diagonal().add_(damping)
    lower, failed_at = torch.linalg.cholesky_ex(square)
    if int(failed_at):
        raise ValueError(
            f"the Gram of the skeleton is not positive definite (at column {int(failed_at)} of {skeleton.numel()}): "
            "use fewer columns, a larger damping, or interpolation_from_data"
        )
    matrix = torch.cholesky_solve(working[skeleton], lower).to(gram.dtype)
    return _with_identity(matrix, skeleton)


def interpolation_from_data(matrix: torch.Tensor, skeleton: torch.Tensor) -> torch.Tensor:
    """T = A[:, J]⁺ A by Householder QR of A[:, J] (its condition number is not squared).

    matrix [m, n] fp32 or fp64 with m >= k, skeleton int64[k] of full numerical rank (else ValueError).
    Cost 2 m k² + 2 m k n flops.
    """
    q, r = torch.linalg.qr(matrix[:, skeleton])
    diagonal = r.diagonal().abs()
    if r.shape[0] < skeleton.numel() or bool((diagonal <= torch.finfo(r.dtype).eps * diagonal.max()).any()):
        raise ValueError("the skeleton's columns are linearly dependent to rounding")
    return _with_identity(torch.linalg.solve_triangular(r, q.mT @ matrix, upper=True), skeleton)


def trailing_error_from_gram(gram: torch.Tensor, interpolation: torch.Tensor, skeleton: torch.Tensor) -> float:
    """‖A - A[:, J] T‖_F from G = AᵀA, for any T [k, n]: sqrt(tr G - 2 tr(Tᵀ G[J, :]) + tr(Tᵀ G[J, J] T)), in fp64.

    Differences below √eps ‖A‖_F are rounding (the squares cancel). Cost 2 k² n flops.
    """
    working, coefficients = gram.double(), interpolation.double()
    rows = working[skeleton]
    square = working.trace() - 2 * (coefficients * rows).sum()
    square += (coefficients * (rows[:, skeleton] @ coefficients)).sum()
    return float(square.clamp_min(0).sqrt())


def trailing_error_from_data(matrix: torch.Tensor, interpolation: torch.Tensor, skeleton: torch.Tensor) -> float:
    """‖A - A[:, J] T‖_F, the residual itself: accurate to eps ‖A‖_F, needs the data. Cost 2 m k n flops."""
    residual = torch.addmm(matrix, matrix[:, skeleton], interpolation, alpha=-1)
    return float(torch.linalg.vector_norm(residual, dtype=torch.float64))


def _with_identity(matrix: torch.Tensor, skeleton: torch.Tensor) -> torch.Tensor:
    matrix[:, skeleton] = torch.eye(skeleton.numel(), dtype=matrix.dtype, device=matrix.device)
    return matrix


def _check_rank(factor: PivotedFactor, rank: int) -> None:
    if not 0 <= rank <= factor.pivots.numel():
        raise ValueError(f"rank {rank} is outside [0, {factor.pivots.numel()}]")
