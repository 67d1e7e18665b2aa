"""Uncentred principal component analysis from a Gram: the directions that hold most of the rows' energy."""

import torch


def principal_directions(gram: torch.Tensor, precision: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the principal directions of `X` from `gram = XᵀX (n, n)`: orthonormal columns, the strongest first.

    The span of the first k holds more of the rows' energy than any other of dimension k (Eckart and Young 1936).
    Eigendecomposition in this precision, about 9 n³ multiply-adds. The sign of each direction is fixed (its largest
    entry is positive), so that the result does not depend on the solver.
    """
    return principal_components(gram, precision)[0]


def principal_components(
    gram: torch.Tensor, precision: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `principal_directions` returns, and the rows' energy along each of them, float64 `(n,)`."""
    values, vectors = torch.linalg.eigh(gram.to(precision))
    vectors = vectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * largest.sign(), values.flip(0).double().clamp_min(0)


def energies_along(gram: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Return `‖X u‖²` from `gram = XᵀX (n, n)`, for each column `u` of `directions (n, k)`; float64 `(k,)`."""
    return ((gram.to(directions) @ directions).double() * directions).sum(0).clamp_min(0)
