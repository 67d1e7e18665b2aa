"""Selectors that keep the columns with the largest scores, and the blocks with the largest sums of scores."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from oneshot.selection.evidence import Evidence
from oneshot.selection.selector import DOUBLE, Blocks, Cost, Extent, Need, Selector


@dataclass(frozen=True)
class ByScore(Selector):
    """Choose by a score of every column.

    Attributes:
        scores: float64 `(n,)` from the evidence.
        needs: as in `Selector`.
    """

    scores: Callable[[Evidence], torch.Tensor]
    needs: frozenset[Need] = frozenset({"gram"})

    def neurons(self, evidence: Evidence, kept: int) -> torch.Tensor:
        """Return the columns with the largest scores."""
        return self.scores(evidence).topk(kept).indices.sort().values

    def blocks(self, evidence: Evidence, blocks: Blocks) -> torch.Tensor:
        """Return the blocks of every class with the largest sums."""
        scores = self.scores(evidence).view(blocks.count, -1).sum(1).view(blocks.num_classes, -1)
        best = scores.topk(blocks.quota, dim=1).indices
        first = torch.arange(len(best), device=best.device).unsqueeze(1) * scores.shape[1]
        return (best + first).flatten().sort().values

    def shared(self, evidence: Evidence) -> torch.Tensor:
        """Return the scores of the columns."""
        return self.scores(evidence)

    def blocks_of_shared(self, total: torch.Tensor, count: int, kept: int) -> torch.Tensor:
        """Return the blocks with the largest sums over columns and layers."""
        return total.view(count, -1).sum(1).topk(kept).indices.sort().values

    def cost(self, extent: Extent) -> Cost:
        """Return the cost of the consumer in float64."""
        return Cost(2 * DOUBLE * extent.outputs * extent.columns)


def activation_norm(evidence: Evidence) -> torch.Tensor:
    """Return `‖a_j‖² ‖w_j‖²`."""
    return _squares(evidence) * evidence.output_energies()


def wanda(evidence: Evidence) -> torch.Tensor:
    """Return `‖a_j‖ Σ_i |w_ij|` (Wanda-sp, An et al. 2023)."""
    return _squares(evidence).sqrt() * evidence.consumer.double().abs().sum(0)


def flap(evidence: Evidence) -> torch.Tensor:
    """Return `var(a_j) ‖w_j‖²` (FLAP, An et al. 2023, eq. 5)."""
    return evidence.known_moments().deviation.square() * evidence.output_energies()


def tcsp_score(evidence: Evidence) -> torch.Tensor:
    """Return `‖w_j‖ (E a_j + std a_j)`, the mean with its sign (TCSP eq. 25, algorithm 4)."""
    moments = evidence.known_moments()
    return evidence.output_energies().sqrt() * (moments.mean + moments.deviation)


def magnitude(evidence: Evidence) -> torch.Tensor:
    """Return the squared norm of the column's own weights, on both sides."""
    assert evidence.producer_energy is not None
    return evidence.output_energies() + evidence.producer_energy.double()


def random(evidence: Evidence) -> torch.Tensor:
    """Return a draw."""
    size, device = evidence.consumer.shape[1], evidence.consumer.device
    return torch.rand(size, dtype=torch.float64, generator=evidence.generator).to(device)


def _squares(evidence: Evidence) -> torch.Tensor:
    """Return `‖a_j‖²`, float64 `(n,)`."""
    return evidence.known_gram().diagonal().double().clamp_min(0)
