"""Interpolative decomposition from a Gram: `A ≈ A[:, skeleton] P` with `P[:, skeleton] = I`."""

from dataclasses import dataclass

import torch

from oneshot.linalg.psd import RidgeFactor


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
        """`max |T_ij|`: large values mean an ill-chosen skeleton (Gu and Eisenstat 1996)."""
        return float(self.coefficients.abs().max()) if self.coefficients.numel() else 0.0


def interpolate(gram: torch.Tensor, skeleton: torch.Tensor, damping: float) -> Interpolation:
    """Solve `min_T ‖A[:, rest] − A[:, skeleton] T‖² + λ‖T‖²` from `gram = AᵀA (n, n)`.

    STAT equation 2 with a ridge `λ = damping · mean(diag gram[skeleton, skeleton])`. With damping 0 and the
    skeleton from column-pivoted QR, `T = R11⁻¹ R12`. The ridge leaves `P[:, skeleton] = I` exact, so it shrinks
    towards "no correction", not towards zero output.
    """
    in_skeleton = torch.zeros(len(gram), dtype=torch.bool, device=gram.device)
    in_skeleton[skeleton] = True
    rest = (~in_skeleton).nonzero().squeeze(1)
    rows = skeleton.unsqueeze(1)  # entries are gathered at once, so that no copy of whole rows is made
    factor = RidgeFactor(gram[rows, skeleton], damping)
    return Interpolation(skeleton, rest, factor.solve(gram[rows, rest]), factor)
