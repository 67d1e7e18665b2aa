"""Interpolative decomposition from a Gram: `A ≈ A[:, skeleton] P` with `P[:, skeleton] = I`."""

from dataclasses import dataclass

import torch
from oneshot_kernels import columns_without, suffix_sums

from oneshot.linalg.psd import RidgeFactor, ridged_cholesky

PANEL_ROWS = 1024
CURVE_ROWS = 256  # of a triangular factor in one product
SMALLEST_RIDGE = 1e-7  # of the mean diagonal; what float32 sums know


@dataclass(frozen=True)
class Interpolation:
    """`P = [I, T]` in the order `[skeleton, rest]` of the columns.

    Attributes:
        skeleton, rest: int64, a partition of the columns.
        coefficients: `T (k, n − k)` float64, `A[:, rest] ≈ A[:, skeleton] T`.
        factor: the factor of the skeleton's ridged Gram, for further right-hand sides.
    """

    skeleton: torch.Tensor
    rest: torch.Tensor
    coefficients: torch.Tensor
    factor: RidgeFactor

    @property
    def max_coefficient(self) -> float:
        """Return `max |T_ij|`; large values mean an ill-chosen skeleton (Gu and Eisenstat 1996)."""
        return float(self.coefficients.abs().max()) if self.coefficients.numel() else 0.0


def interpolate(gram: torch.Tensor, skeleton: torch.Tensor, damping: float) -> Interpolation:
    """Solve `min_T ‖A[:, rest] − A[:, skeleton] T‖² + λ‖T‖²` from `gram = AᵀA (n, n)`.

    STAT equation 2 with a ridge `λ = damping · mean(diag gram[skeleton, skeleton])`. With damping 0 and the
    skeleton from column-pivoted QR, `T = R11⁻¹ R12`. The ridge leaves `P[:, skeleton] = I` exact, so it shrinks
    towards "no correction", not towards zero output.
    """
    rest = columns_without(skeleton, len(gram))
    rows = skeleton.unsqueeze(1)  # entries are gathered at once, so that no copy of whole rows is made
    factor = RidgeFactor(gram[rows, skeleton], damping, "kept columns")
    return Interpolation(skeleton, rest, factor.solve(gram[rows, rest]), factor)


def spanning_columns(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return k columns that span all n, the others, and `T (k, n − k)` with `A[:, others] = A[:, columns] T`.

    Exact, because A has full row rank. T depends on the row space alone. So the columns are the pivots of an LU
    factorisation of an orthonormal basis of it, which keeps T small however A's rows are scaled (DEIM: Chaturantabut
    and Sorensen 2010). Pivoted QR of that basis would make T about a third smaller (Drmač and Gugercin 2016, arXiv
    1505.00370), and takes about five times as long.

    Args:
        matrix: `A (k, n)` float64 of rank k.

    Returns:
        Two ascending int64 vectors, a partition of the columns, and T in float64.
    """
    rows, size = matrix.shape
    factor, swaps = torch.linalg.lu_factor(torch.linalg.qr(matrix.T).Q)
    order = list(range(size))
    for row, swapped in enumerate(swaps.tolist()):  # LAPACK counts from one
        order[row], order[swapped - 1] = order[swapped - 1], order[row]
    numbers = torch.tensor(order, device=matrix.device)
    columns, of_columns = numbers[:rows].sort()
    others, of_others = numbers[rows:].sort()
    coefficients = torch.linalg.solve_triangular(factor[:rows].mT, factor[rows:].mT, upper=True, unitriangular=True)
    return columns, others, coefficients[of_columns][:, of_others]


def coefficients_of(matrix: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the other columns, ascending, and `T (k, n − k)` with `A[:, others] = A[:, columns] T`.

    T is large, or not finite, if the columns do not span A's.

    Args:
        matrix: `A (k, n)` float64 of rank k. columns: int64 `(k,)`.
    """
    others, basis = columns_without(columns, matrix.shape[1]), torch.linalg.qr(matrix.T).Q
    found, info = torch.linalg.solve_ex(basis[columns].T, basis[others].T)
    return others, torch.where(info == 0, found, torch.nan)


def ordered_factor(gram: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular `R (n, n)` float64 of `A[:, order] = Q R`, without A and without pivoting.

    R is the Cholesky factor of the permuted Gram, with a ridge of 1e-7 of its mean diagonal, or what rounding makes
    necessary (`linalg.psd`).

    Args:
        gram: `AᵀA (n, n)`. order: int64 `(n,)`, all columns.
    """
    floor = torch.finfo(torch.float64).tiny
    found = ridged_cholesky(gram, SMALLEST_RIDGE, of="columns of an error curve", floor=floor, order=order)
    assert found is not None  # there is a ridge
    return found[0].T


def nested_errors(factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `min_W' ‖A Wᵀ − A[:, :k] W'ᵀ‖² / ‖A Wᵀ‖²` for every k in 0 … n; float64 `(n + 1,)` on the host.

    With `A = Q R`, the first k columns span the first k of Q; so of `A Wᵀ = Q (R Wᵀ)` they miss the rows of the bracket
    from k on.

    Args:
        factor: `R (n, n)` of `ordered_factor`. weight: `(d, n)`, its columns in the order of the factor.
    """
    missed = missed_energies(factor, weight)
    return missed / missed[0].clamp_min(torch.finfo(missed.dtype).tiny)


def missed_energies(factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the numerators of `nested_errors`; the first is `‖A Wᵀ‖²`.

    Products are float32: every row of R has its own scale, and its square is rounded relative to it alone.
    """
    columns, starts = weight.float(), range(0, len(factor), CURVE_ROWS)
    # what is left of the diagonal is zero
    rows = [factor[start : start + CURVE_ROWS, start:].float() @ columns[:, start:].T for start in starts]
    energies = torch.cat(rows).square().sum(1, dtype=torch.float64)
    return suffix_sums(energies.cpu())  # on the host, because a sum of one row on CUDA is not deterministic


def trailing_norms(factor: torch.Tensor, column_weights: torch.Tensor) -> torch.Tensor:
    """Return `‖R22‖_F` of `A diag(c) = Q [R11 R12; 0 R22]` for every size k of R11 in 0 … n (STAT section 2, A.3).

    Args:
        factor: `R (n, n)` of `ordered_factor`. column_weights: `c (n,)`, in the order of the factor.

    Returns:
        float64 `(n + 1,)` on the host; the first is `‖A diag(c)‖_F`, the last zero.
    """
    weights = column_weights.double()
    energies = torch.cat([(rows * weights).square().sum(1) for rows in factor.split(PANEL_ROWS)]).cpu()
    return suffix_sums(energies).sqrt()
