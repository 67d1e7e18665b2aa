"""Symmetric positive semi-definite systems, and the one rule for Grams that rounding made singular or indefinite.

The rule is Cholesky of `K = G + λI` in float64, with the ridge λ that was asked for. No pivot of K is below λ if G is
positive semi-definite. If one is, or the factorisation fails, rounding took more than λ from G's eigenvalues. Then λ
grows tenfold until this is no longer so. Thus the Gram itself says how exact its sums were, in float32 or from 16-bit
rows on tensor cores. Without a ridge there is nothing to raise. Then an eigendecomposition leaves out the directions
whose eigenvalues are not above the size of the most negative one.

Every such Gram is a `GramNote` on this module's logger. A run collects the notes (`report.progress.WarningLog`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from oneshot.errors import CheckpointError

logger = logging.getLogger(__name__)
logger.setLevel(logging.WARNING)  # a run collects notes also in a process whose warnings nobody sees

CONDITION_STEPS = 12
ROUNDING = 1e-10  # of a product, beside the vectors before it
SINGULAR = 1 / torch.finfo(torch.float32).eps  # a condition number beyond which float32 sums know nothing
TRUSTED = 0.5  # of the ridge; a smaller pivot is rounding
LARGEST_RIDGE = 100.0  # of the Gram's norm; whatever rounding did, less suffices


@dataclass(frozen=True)
class GramNote:
    """State what was done about a Gram that rounding left singular or indefinite.

    Attributes:
        of: what the Gram is of, in words.
        kind: `raised`: the ridge was raised. `left out`: there was no ridge, so directions were left out. `singular`:
            nothing was done, and float32 sums cannot tell its smallest directions from rounding.
        size: the ridge in units of the mean diagonal (`raised`), the number of directions (`left out`), the condition
            number (`singular`).
    """

    of: str
    kind: Literal["raised", "left out", "singular"]
    size: float

    def __str__(self) -> str:
        if self.kind == "raised":
            return f"its ridge was raised to {self.size:.0e} of the mean diagonal"
        if self.kind == "left out":
            return f"{self.size:.0f} directions were left out, because there is no ridge"
        return f"its condition number is {self.size:.0e}"


def ridged_cholesky(
    gram: torch.Tensor, damping: float, *, of: str, floor: float = 0.0, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, float] | None:
    """Return the lower factor `L (n, n)` float64 of `G + λI`, and the damping that it took; None if no λ was enough.

    `λ = damping · max(mean(diag G), floor)`. Damping grows tenfold until no pivot is rounding; a zero cannot grow.

    Args:
        gram: `G (n, n)` symmetric, any float dtype; rounding may have made it indefinite. of: its name in a `GramNote`.
        floor: smallest mean diagonal, for Grams that may be zero. order: int64 `(n,)`, order of G's rows and columns.

    Raises `CheckpointError` if the Gram has values that are not finite.

    Cost: n³/3 multiply-adds for each damping, and one wait for the device.
    """
    diagonal = gram.diagonal() if order is None else gram.diagonal()[order]
    mean = diagonal.double().mean().clamp_min(floor)
    failed_at = torch.empty((), dtype=torch.int32, device=gram.device)
    asked, largest = damping, None
    while True:
        if order is None:
            square = gram.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        else:
            square = gram[order.unsqueeze(1), order].double()
        ridge = damping * mean
        square.diagonal().add_(ridge)
        # a view in LAPACK's column order is factorised where it lies, so that no second n × n matrix is made
        factor = square.mT
        torch.linalg.cholesky_ex(factor, out=(factor, failed_at))
        if bool(_trusted(factor, failed_at, ridge)):
            break
        if largest is None:
            largest = LARGEST_RIDGE * _finite_norm(gram, of)
            if not float(ridge) > 0:
                return None
        if float(ridge) > largest:
            raise CheckpointError(f"The Gram of the {of} cannot be factorised; check the weights for extreme values.")
        del square, factor
        damping *= 10
    if damping > asked:
        note(GramNote(of, "raised", damping))
    return factor, damping


def _trusted(factor: torch.Tensor, failed_at: torch.Tensor, ridge: torch.Tensor) -> torch.Tensor:
    """Return whether no pivot of factors `(…, n, n)` is rounding, bool `(…,)`; `failed_at`: as LAPACK says it."""
    smallest = factor.diagonal(dim1=-2, dim2=-1).amin(-1)
    return (failed_at == 0) & (smallest > 0) & (smallest.square() >= TRUSTED * ridge)


def note(found: GramNote) -> None:
    """Tell of a Gram: a run collects the record's `gram_note`, and elsewhere it is a warning."""
    logger.warning("The Gram of the %s is singular to rounding: %s.", found.of, found, extra={"gram_note": found})


def _finite_norm(gram: torch.Tensor, of: str) -> float:
    norm = float(torch.linalg.vector_norm(gram, dtype=torch.float64))
    if not norm < torch.inf:
        raise CheckpointError(
            f"The Gram of the {of} overflows to NaN or Inf; run with --dtype float32 or check the weights."
        )
    return norm


class RidgeFactor:
    """A factor of `K = G + λI` with `λ = damping · mean(diag G)`, to solve many right-hand sides.

    A Gram that is singular or indefinite by rounding gets a larger ridge (`damping` then says which); if no ridge was
    asked for, the pseudo-inverse takes over, and `eigenvalue_fallback` says so. The condition number is estimated when
    it is asked for.

    Args:
        gram: `(k, k)` symmetric positive semi-definite, any float dtype.
        damping: the ridge in units of the mean diagonal, ≥ 0. of: what the Gram is of, in words.

    Cost: k³/3 multiply-adds (Cholesky); about 30 times that for the pseudo-inverse. Deterministic.
    """

    def __init__(self, gram: torch.Tensor, damping: float, of: str = "columns") -> None:
        mean = gram.diagonal().double().mean().clamp_min(0)
        found = ridged_cholesky(gram, damping, of=of)
        self.eigenvalue_fallback = found is None
        self.damping = damping if found is None else found[1]
        self.ridge, self._of = self.damping * mean, of
        if found is None:
            self._inverse, self.condition_number = _pseudo_inverse(gram, of)
        else:
            self._cholesky = found[0]

    @cached_property
    def condition_number(self) -> float:
        [found] = condition_numbers(self._cholesky.unsqueeze(0), self._of)
        return found

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """Return `K⁻¹ right` in float64, `right (k, p)`."""
        if self.eigenvalue_fallback:
            return self._inverse @ right.double()
        return solve_with(self._cholesky, right.double())


def cholesky_together(grams: torch.Tensor, dampings: torch.Tensor) -> torch.Tensor | None:
    """Return the lower factors of several ridged Grams `(b, n, n)`, float64; None if one needs a larger ridge.

    Otherwise as `ridged_cholesky`; `dampings (b,)`. A device takes as long as for one, and is waited for once.
    """
    squares = grams.to(torch.float64, copy=True)
    ridges = dampings * squares.diagonal(dim1=1, dim2=2).mean(1)
    squares.diagonal(dim1=1, dim2=2).add_(ridges.unsqueeze(1))
    factors, failed_at = torch.linalg.cholesky_ex(squares)
    return factors if bool(_trusted(factors, failed_at, ridges).all()) else None


def condition_numbers(factors: torch.Tensor, of: str) -> list[float]:
    """Estimate the condition numbers of several Grams from their lower factors `(b, k, k)`.

    `λ_max / λ_min` come from Lanczos steps with `K` and with `K⁻¹`: a lower bound, good to a few per cent, in four
    digits. A device takes as many kernels for several as for one, and one wait. `of`: what the Grams are of, in words.
    """
    start = torch.linspace(1, 2, factors.shape[-1], dtype=factors.dtype, device=factors.device).unsqueeze(1)
    start = start.expand(len(factors), -1, -1)
    largest = _tridiagonal(lambda vectors: factors @ (factors.mT @ vectors), start)
    smallest_inverse = _tridiagonal(lambda vectors: solve_with(factors, vectors), start)
    values = torch.linalg.eigvalsh(torch.stack((largest, smallest_inverse)).cpu())[..., -1]
    # further digits depend on how many are together
    found = [max(1.0, float(f"{condition:.4g}")) for condition in values.prod(0).tolist()]
    for condition in found:
        if condition > SINGULAR:
            note(GramNote(of, "singular", condition))
    return found


def solve_with(factor: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `(L Lᵀ)⁻¹ right` of lower factors `L (…, k, k)`, `right (…, k, p)`."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def _pseudo_inverse(gram: torch.Tensor, of: str) -> tuple[torch.Tensor, float]:
    """Return `G⁺ (n, n)` float64 over the directions that are above rounding, and its condition number."""
    values, vectors = torch.linalg.eigh(gram.double())
    info = torch.finfo(values.dtype)
    rounding = torch.maximum(values[-1] * len(gram) * info.eps, -values[0]).clamp_min(info.tiny)
    positive = values > rounding
    inverse = torch.where(positive, 1 / values.clamp_min(info.tiny), 0)
    kept = values[positive]
    note(GramNote(of, "left out", len(gram) - len(kept)))
    condition = float(kept[-1] / kept[0]) if len(kept) else 1.0  # of nothing, which is exact
    return (vectors * inverse) @ vectors.T, condition


def _tridiagonal(product: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """Return the Lanczos matrices of symmetric products, `(b, steps, steps)`; eigenvalues are within the product's.

    Every vector is made orthogonal to all before it, twice; what is then only rounding becomes zero. `start (b, n, 1)`.
    The device is not waited for.
    """
    basis = start.new_zeros(*start.shape[:2], CONDITION_STEPS)
    projected = start.new_zeros(len(start), CONDITION_STEPS, CONDITION_STEPS)
    vector = start / _norms(start)
    for step in range(CONDITION_STEPS):
        basis[..., step : step + 1] = vector
        vector = product(vector)
        known, rounding = basis[..., : step + 1], ROUNDING * _norms(vector)
        inside = known.mT @ vector
        projected[:, : step + 1, step : step + 1] = inside
        vector = vector - known @ inside
        vector = vector - known @ (known.mT @ vector)
        norm = _norms(vector)
        vector = vector * torch.where(norm > rounding, 1 / norm, 0.0)
    return (projected.triu() + projected.triu(1).mT).nan_to_num_()


def _norms(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors `(b, n, 1)` -> `(b, 1, 1)`."""
    return torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
