"""Gu–Eisenstat swaps: bound the interpolation matrix after greedy pivoting."""

from __future__ import annotations

import torch

from oneshot_kernels.pivoted_qr.factor import PivotedFactor, suffix_sums


def strong_rrqr_swaps(
    factor: PivotedFactor, *, rank: int, bound: float = 2.0, max_swaps: int | None = None
) -> PivotedFactor:
    """Swap skeleton columns for others until max |R11⁻¹ R12| <= bound (Gu & Eisenstat 1996, doi:10.1137/0917055).

    While some |T_ij| > bound, columns i and rank + j of the permuted matrix change places and R is made triangular
    again. A swap multiplies |det R11| by ρ_ij >= |T_ij| > bound (their lemma 3.1), so for bound > 1 it ends, after
    at most log(√(rank · n)^rank) / log(bound) swaps from greedy pivots and nearly always after a few. This bounds
    |T|, as their weaker condition does; their ρ also bounds the singular values of R22.

    factor     from any routine here; a skeleton beyond its `factorised_rank` is improved up to there.
    rank       size of the skeleton to improve; skeletons of other sizes are not.
    max_swaps  stop after so many (None: rank); the bound may then not hold: check max|interpolation_matrix(...)|.
    Returns a factor with the same columns and a new order. Raises ValueError for bound <= 1 or rank outside [0, n].
    Cost per swap 2 r² n flops (a QR of r [r, n]). Deterministic.
    """
    if not bound > 1:
        raise ValueError(f"bound {bound} must be above 1, or the swaps need not end")
    if not 0 <= rank <= factor.pivots.numel():
        raise ValueError(f"rank {rank} is outside [0, {factor.pivots.numel()}]")
    r, pivots = factor.r.clone(), factor.pivots.clone()
    rank = min(rank, r.shape[0])
    if rank == 0 or rank == pivots.numel():
        return factor
    for _ in range(rank if max_swaps is None else max_swaps):
        coefficients = torch.linalg.solve_triangular(r[:rank, :rank], r[:rank, rank:], upper=True).abs()
        largest = int(coefficients.argmax())
        inside, outside = divmod(largest, coefficients.shape[1])
        if float(coefficients[inside, outside]) <= bound:
            break
        order = torch.arange(pivots.numel(), device=pivots.device)
        order[inside], order[rank + outside] = rank + outside, inside
        pivots = pivots[order]
        _, r = torch.linalg.qr(r[:, order], mode="r")
    not_factorised = factor.trailing_errors[factor.factorised_rank].square()
    errors = factor.trailing_errors.clone()
    errors[: r.shape[0] + 1] = (suffix_sums(r.square().sum(dim=1)) + not_factorised).sqrt()
    return PivotedFactor(pivots, errors, r)
