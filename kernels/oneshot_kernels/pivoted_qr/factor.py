"""The record that every pivoted factorisation returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PivotedFactor:
    """A[:, pivots] = Q [r; 0] with Q's columns orthonormal: what a column-pivoted QR knows about every rank.

    pivots           int64[n]: a permutation of the columns, best column first.
    trailing_errors  float64[n + 1]: entry k is ‖R22‖_F = ‖A - A[:, pivots[:k]] T‖_F (T the least-squares
                     interpolation matrix) after k pivots; entry 0 is ‖A‖_F. Never increases. Exact up to
                     `factorised_rank`, an upper bound beyond it (the columns not factorised keep their norms).
    r                [factorised_rank, n]: upper-trapezoidal factor of the permuted columns.
    """

    pivots: torch.Tensor
    trailing_errors: torch.Tensor
    r: torch.Tensor

    @property
    def factorised_rank(self) -> int:
        """Rows of `r`: the rank asked for, or the numerical rank where that is smaller."""
        return self.r.shape[0]


def empty_factor(num_columns: int, dtype: torch.dtype, device: torch.device) -> PivotedFactor:
    """Return the factor of a matrix of zeros: pivots in index order, no rows in `r`."""
    return PivotedFactor(
        pivots=torch.arange(num_columns, device=device),
        trailing_errors=torch.zeros(num_columns + 1, dtype=torch.float64, device=device),
        r=torch.zeros(0, num_columns, dtype=dtype, device=device),
    )


def suffix_sums(values: torch.Tensor) -> torch.Tensor:
    """Return `out[k] = sum(values[k:])` for k = 0 … len, smallest terms first: a tiny tail keeps its digits.

    Summed on the CPU wherever `values` are: torch names `cumsum` of floats on CUDA as not deterministic.
    """
    sums = values.double().cpu().flip(0).cumsum(0).flip(0)
    return torch.cat([sums, sums.new_zeros(1)]).to(values.device)


def trailing_errors(r: torch.Tensor, residual_squares: torch.Tensor) -> torch.Tensor:
    """Return the error curve of a factor, float64[n + 1].

    errors[k]² = sum of ‖r[j, :]‖² over j >= k, plus the sum of `residual_squares`, for k <= rank (rows of r);
    beyond it the residuals of columns not yet taken. `residual_squares` [n - rank] holds the squared norms that are
    left in the columns after `rank` (negative ones, from rounding, count as zero).
    """
    rows = suffix_sums(torch.linalg.vector_norm(r, dim=1, dtype=torch.float64).square().cpu())
    rest = suffix_sums(residual_squares.clamp_min(0).cpu())
    return torch.cat([rows[:-1] + rest[0], rest]).sqrt().to(r.device)


def columns_without(taken: torch.Tensor, count: int) -> torch.Tensor:
    """Return columns 0 … count - 1 less the distinct `taken (…, k)`, in index order, int64 `(…, count - k)`.

    The device is not waited for, as counting them would.
    """
    flags = torch.zeros(*taken.shape[:-1], count, dtype=torch.uint8, device=taken.device).scatter_(-1, taken, 1)
    return flags.argsort(dim=-1, stable=True)[..., : count - taken.shape[-1]]
