"""Uncentred principal component analysis from a Gram: the subspace that holds most of the rows' energy."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Subspace:
    """The span of the leading eigenvectors of a Gram.

    Attributes:
        basis: `P (n, k)` float64 with orthonormal columns, the largest eigenvalue first.
        relative_error: `‖X − X P Pᵀ‖_F / ‖X‖_F` of the rows `X` that the Gram was summed over.
    """

    basis: torch.Tensor
    relative_error: float


def principal_subspace(gram: torch.Tensor, size: int) -> Subspace:
    """The `size` leading principal directions of `X` from `gram = XᵀX (n, n)` (Eckart and Young 1936).

    Eigendecomposition in float64, about 9 n³ multiply-adds. The sign of each direction is fixed (its largest entry is
    positive), so that the result does not depend on the solver.
    """
    eigenvalues, vectors = torch.linalg.eigh(gram.double())
    energies = eigenvalues.clamp_min(0).flip(0)
    basis = vectors.flip(1)[:, :size]
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    tail, total = energies[size:].sum(), energies.sum()
    relative_error = float((tail / total.clamp_min(torch.finfo(total.dtype).tiny)).sqrt())
    return Subspace(basis * largest.sign(), relative_error)
