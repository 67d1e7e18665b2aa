"""Selectors of FFN neurons and attention heads, chosen by name; pure functions of tensors."""

from dataclasses import dataclass

import torch

from oneshot.compression.curvature import neuron_gram
from oneshot.compression.statistics import Moments
from oneshot.linalg.elimination import eliminate
from oneshot.linalg.pivoted_qr import GROUP_SIZE, pivots_with_quota, weighted_pivots
from oneshot.linalg.psd import RidgeFactor
from oneshot.recipes import Pivoting, PivotWeights, Selector

SELECTION_DAMPING = 1e-2  # of `obs` and `leverage`


@dataclass(frozen=True)
class Evidence:
    """The evidence of a selector: a sublayer's columns `A`, the linear that reads them, the weights that make them.

    Attributes:
        consumer: `(d, n)` without its bias.
        producer_energy: `(n,)`: squared norms of the rows that make each column, summed over linears; only for
            `magnitude`, else None.
        gram: `AᵀA (n, n)`; None for selectors that only look at weights.
        moments: means and deviations of the columns, for `tcsp-score` and `flap`.
        sketch: `S A (s, n)` to choose pivots from instead of the Gram; or None.
        pivot_weights: which weights `id` gives to columns, see `column_weights`.
        curvature: `(d, d)` of the consumer's output, by which `id` weighs neurons instead; or None.
        pivoting, group_size: how `id` finds pivots of neurons, as in `linalg.pivoted_qr.weighted_pivots`.
        generator: source of the selector `random`.
    """

    consumer: torch.Tensor
    producer_energy: torch.Tensor | None
    gram: torch.Tensor | None
    generator: torch.Generator
    moments: Moments | None = None
    sketch: torch.Tensor | None = None
    pivoting: Pivoting = "cholesky"
    group_size: int = GROUP_SIZE
    pivot_weights: PivotWeights = "output"
    curvature: torch.Tensor | None = None

    def column_weights(self) -> torch.Tensor:
        """Return the weights of the columns in `id`, float64 `(n,)`.

        `output`: the norms of the consumer's columns (STAT A.3). `none`: ones, so that pivots see activations alone.
        """
        norms = self.consumer.double().norm(dim=0)
        return norms if self.pivot_weights == "output" else torch.ones_like(norms)

    def neurons(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the Gram `(n, n)` of neurons and the weights `(n,)` of its columns, by which `id` takes pivots."""
        assert self.gram is not None
        if self.curvature is None:
            return self.gram, self.column_weights()
        gram = neuron_gram(self.gram, self.consumer, self.curvature)
        return gram, torch.ones(len(gram), dtype=torch.float64, device=gram.device)


def column_scores(selector: Selector, evidence: Evidence) -> torch.Tensor:
    """Return a score for every column, float64 `(n,)`; columns with the largest scores stay, or heads by their sums.

    `activation-norm`: `‖a_j‖² ‖w_j‖²`. `wanda`: `‖a_j‖ Σ_i |w_ij|` (Wanda-sp, An et al. 2023). `flap`:
    `var(a_j) ‖w_j‖²` (FLAP, An et al. 2023, eq. 5). `leverage`: the ridge leverage score `[G (G + λI)⁻¹]_jj` (MoDeGPT,
    Lin et al. 2024). `tcsp-score`: `‖w_j‖ (E a_j + std a_j)`, the mean with its sign (TCSP eq. 25, algorithm 4).
    `magnitude`: the squared norm of the column's own weights, on both sides. `random`: a draw.
    """
    weight, gram, moments = evidence.consumer.double(), evidence.gram, evidence.moments
    energy = weight.square().sum(0)
    if selector == "random":
        return torch.rand(len(energy), dtype=torch.float64, generator=evidence.generator).to(energy.device)
    if selector == "magnitude":
        assert evidence.producer_energy is not None
        return energy + evidence.producer_energy.double()
    if selector in ("flap", "tcsp-score"):
        assert moments is not None
        if selector == "flap":
            return moments.deviation.square() * energy
        return energy.sqrt() * (moments.mean + moments.deviation)
    assert gram is not None
    if selector == "leverage":
        return RidgeFactor(gram, SELECTION_DAMPING, "columns with leverage scores").solve(gram).diagonal()
    squares = gram.diagonal().double().clamp_min(0)
    return {"activation-norm": squares * energy, "wanda": squares.sqrt() * weight.abs().sum(0)}[selector]


def select_neurons(selector: Selector, kept_size: int, evidence: Evidence) -> torch.Tensor:
    """Return the FFN neurons to keep, ascending int64 `(kept_size,)`.

    `id`: pivots of the weighted activations (STAT sections 2 and 3.1). `obs`: backward elimination
    (`linalg.elimination`). Others: the largest `column_scores`.
    """
    if selector == "id":
        return (
            weighted_pivots(
                *evidence.neurons(),
                rank=kept_size,
                sketch=evidence.sketch,
                pivoting=evidence.pivoting,
                group_size=evidence.group_size,
            )
            .sort()
            .values
        )
    if selector == "obs":
        assert evidence.gram is not None
        return eliminate(evidence.gram, evidence.consumer, kept=kept_size, damping=SELECTION_DAMPING)
    return column_scores(selector, evidence).topk(kept_size).indices.sort().values


def select_heads(
    selector: Selector,
    evidence: Evidence,
    *,
    num_groups: int,
    heads_per_group: int,
    kept_groups: int,
    kept_heads_per_group: int,
) -> torch.Tensor:
    """Return the query heads to keep, ascending int64: whole KV groups, or equally many heads in every group.

    Either keeps the result a stock model. `id`: pivots of the flattened, output-weighted heads (STAT section 3.2):
    every head is one long column (tokens × head size), whose Gram is the sum over the head's coordinates. `obs`:
    backward elimination of whole heads. Others: the largest sums of `column_scores` over a head's columns.
    """
    num_heads = num_groups * heads_per_group
    device = evidence.consumer.device
    head_dim = evidence.consumer.shape[1] // num_heads
    heads = torch.arange(num_heads, device=device)
    by_group = kept_groups < num_groups
    columns = head_dim * heads_per_group if by_group else head_dim
    units = num_groups if by_group else num_heads
    quota = kept_groups if by_group else kept_heads_per_group
    class_of = torch.zeros_like(heads[:units]) if by_group else heads // heads_per_group
    if selector == "obs":
        assert evidence.gram is not None
        chosen = eliminate(
            evidence.gram,
            evidence.consumer,
            kept=quota,
            block_size=columns,
            class_of=class_of,
            damping=SELECTION_DAMPING,
        )
    elif selector == "id":
        assert evidence.gram is not None
        chosen = pivots_with_quota(unit_gram(evidence, units), class_of, quota=quota)
    else:
        scores = column_scores(selector, evidence).view(units, columns).sum(1)
        best = scores.view(-1, units if by_group else heads_per_group).topk(quota, dim=1).indices
        chosen = (best + torch.arange(len(best), device=device).unsqueeze(1) * heads_per_group).flatten()
    chosen = chosen.sort().values
    return heads.view(num_groups, heads_per_group)[chosen].flatten() if by_group else chosen


def group_order(evidence: Evidence, num_groups: int) -> torch.Tensor:
    """Return all KV groups, the first to keep first, int64 `(groups,)`: the first k are what `id` keeps of them."""
    one_class = torch.zeros(num_groups, dtype=torch.int64, device=evidence.consumer.device)
    return pivots_with_quota(unit_gram(evidence, num_groups), one_class, quota=num_groups)


def unit_gram(evidence: Evidence, units: int) -> torch.Tensor:
    """Return the Gram `(units, units)` float64 of equal, neighbouring parts of the columns, as one long column each.

    Columns are weighted (`Evidence.column_weights`).
    """
    assert evidence.gram is not None
    weights = evidence.column_weights()
    weighted = evidence.gram.double() * weights * weights.unsqueeze(1)
    return torch.einsum("idjd->ij", weighted.view(units, -1, units, len(weights) // units))
