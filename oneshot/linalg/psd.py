"""Symmetric positive semi-definite systems: ridge, Cholesky, and an eigendecomposition where Cholesky fails."""

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

CONDITION_STEPS = 12
ROUNDING = 1e-10  # of a product, beside the vectors before it
SINGULAR = 1 / torch.finfo(torch.float32).eps  # a condition number beyond which float32 sums know nothing


class RidgeFactor:
    """A factor of `K = G + λI` with `λ = damping · mean(diag G)`, to solve many right-hand sides.

    Cholesky in float64; where that fails (an indefinite or exactly singular Gram with no damping) the
    pseudo-inverse from an eigendecomposition takes over, and `eigenvalue_fallback` says so.

    Args:
        gram: `(k, k)` symmetric positive semi-definite, any float dtype.
        damping: the ridge in units of the mean diagonal, ≥ 0.

    Cost: k³/3 multiply-adds (Cholesky); about 30 times that for the fallback. Deterministic.
    """

    def __init__(self, gram: torch.Tensor, damping: float) -> None:
        self.ridge = damping * gram.diagonal().double().mean().clamp_min(0)
        matrix = self._ridged(gram)
        # a view in LAPACK's column order is factorised where it lies, so that no second k × k matrix is made
        self._cholesky = matrix.mT
        failed_at = torch.empty((), dtype=torch.int32, device=matrix.device)
        torch.linalg.cholesky_ex(self._cholesky, out=(self._cholesky, failed_at))
        self.eigenvalue_fallback = bool(failed_at) or not bool(torch.isfinite(self._cholesky.diagonal()).all())
        if self.eigenvalue_fallback:
            logger.warning("Cholesky of a %d × %d Gram failed; using its eigendecomposition.", *gram.shape)
            eigenvalues, vectors = torch.linalg.eigh(self._ridged(gram))
            tiny = torch.finfo(eigenvalues.dtype).tiny
            rounding = eigenvalues[-1] * len(gram) * torch.finfo(eigenvalues.dtype).eps
            positive = eigenvalues > rounding.clamp_min(tiny)
            inverse = torch.where(positive, 1 / eigenvalues.clamp_min(tiny), 0)
            self._inverse = (vectors * inverse) @ vectors.T
            kept = eigenvalues[positive]
            self.condition_number = float(kept[-1] / kept[0]) if len(kept) else 1.0  # of nothing, which is exact
        else:
            self.condition_number = self._estimate_condition()
            if self.condition_number > SINGULAR:
                logger.warning(
                    "A %d × %d Gram is singular to rounding (condition number %.0e); give more text or more --damping.",
                    *gram.shape,
                    self.condition_number,
                )

    def _ridged(self, gram: torch.Tensor) -> torch.Tensor:
        matrix = gram.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        matrix.diagonal().add_(self.ridge)
        return matrix

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """Return `K⁻¹ right` in float64, `right (k, p)`."""
        if self.eigenvalue_fallback:
            return self._inverse @ right.double()
        half = torch.linalg.solve_triangular(self._cholesky, right.double(), upper=False)
        return torch.linalg.solve_triangular(self._cholesky.mT, half, upper=True)

    def _estimate_condition(self) -> float:
        """Return `λ_max / λ_min` from Lanczos steps with `K` and with `K⁻¹`; a lower bound, good to a few per cent."""
        factor = self._cholesky
        start = torch.linspace(1, 2, len(factor), dtype=factor.dtype, device=factor.device).unsqueeze(1)
        largest = _tridiagonal(lambda vector: factor @ (factor.T @ vector), start)
        smallest_inverse = _tridiagonal(self.solve, start)
        values = torch.linalg.eigvalsh(torch.stack((largest, smallest_inverse)).cpu())[:, -1]
        return max(1.0, float(values.prod()))


def _tridiagonal(product: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """Return the Lanczos matrix of a symmetric `product`, `(steps, steps)`; its eigenvalues are within the product's.

    Every vector is made orthogonal to all before it, twice; what is then only rounding becomes zero. `start (n, 1)`.
    The device is not waited for.
    """
    basis = start.new_zeros(len(start), CONDITION_STEPS)
    projected = start.new_zeros(CONDITION_STEPS, CONDITION_STEPS)
    vector = start / start.norm()
    for step in range(CONDITION_STEPS):
        basis[:, step : step + 1] = vector
        vector = product(vector)
        known, rounding = basis[:, : step + 1], ROUNDING * vector.norm()
        inside = known.T @ vector
        projected[: step + 1, step : step + 1] = inside
        vector = vector - known @ inside
        vector = vector - known @ (known.T @ vector)
        norm = vector.norm()
        vector = vector * torch.where(norm > rounding, 1 / norm, 0.0)
    return (projected.triu() + projected.triu(1).T).nan_to_num_()
