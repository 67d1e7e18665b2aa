"""The contribution of every expert of a mixture: published scores, and the exact effect of removing an expert.

In a layer, expert e has the gate score a_e of a token, and of the k experts with the largest scores the output is
`y = Σ g_e o_e`. Without expert e the (k+1)-th expert steps in and the gates change: `r_e = y − y_without_e`. The matrix
`R_ij = Σ ⟨r_i, r_j⟩` over tokens is what `linalg.expert_sets` takes sets from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from oneshot.linalg.expert_sets import least_removal
from oneshot.linalg.sums import add_product_
from oneshot.machine import Workers
from oneshot.stream import Placement

GateRule = Literal["normalised", "softmax", "independent"]
"""How gates come from the scores of the chosen: divided by their sum (Qwen3-MoE, Mixtral, gpt-oss); a softmax over all
experts as it is (OLMoE, Qwen2-MoE), which grows if another expert is removed; or sigmoids as they are."""

ExpertSelector = Literal["effects", "frequency", "reap", "man", "energy", "random"]
"""`effects` takes the set with the least joint effect, the others the experts with the smallest `EXPERT_SCORES`."""

ExpertOutput = Callable[[range, torch.Tensor], torch.Tensor]
"""The outputs `(n, r, d)` of n experts without their gates, from their numbers and their inputs `(n, r, d)`."""

OUTLIER = 10.0  # times the median peak of a layer


@dataclass(frozen=True)
class Routed:
    """A batch of t tokens at a layer with E experts of which k are active.

    Attributes:
        experts: int64 `(t, k + 1)`, by falling preference; the last would step in.
        gates: float32 `(t, k)` of the first k.
        gates_without: float32 `(t, k, k + 1)`: of all k + 1 if the i-th is removed, whose own is 0.
        num_experts: E.
        growth: float32 `(t, E)`: by which share the gates of a token grow if an expert that it does not have is
            removed, and 0 for its k experts; `softmax` only, else None.
    """

    experts: torch.Tensor
    gates: torch.Tensor
    gates_without: torch.Tensor
    num_experts: int
    growth: torch.Tensor | None


def route(
    scores: torch.Tensor,
    top_k: int,
    rule: GateRule,
    preference: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> Routed:
    """Route a batch with every expert, and with each of a token's experts removed.

    A constant factor of all gates is left out: it scales all effects alike.

    Args:
        scores: `(t, E)`, at least 0: softmax or sigmoid of the router's logits; float64 for the rule `softmax`, where
            scores near 1 are subtracted from 1.
        preference: `(t, E)`, by which experts are chosen if not by their scores (DeepSeek-V3's bias); without groups.
        chosen: int64 `(t, k)`: the experts that the stock router chose, which rounds preferences and so has ties of its
            own; None for the experts of the largest preference.

    Raises:
        ValueError: if no expert is left to step in.
    """
    num_experts = scores.shape[-1]
    if top_k >= num_experts:
        raise ValueError(f"no expert can be removed if all {num_experts} are active")
    order = scores if preference is None else preference
    if chosen is None:
        experts = order.topk(top_k + 1, dim=-1).indices
    else:
        first = chosen.gather(-1, order.gather(-1, chosen).argsort(-1, descending=True))
        experts = torch.cat([first, order.scatter(-1, chosen, -torch.inf).argmax(-1, keepdim=True)], -1)
    likely = scores.double().gather(-1, experts)
    without = likely[:, None].expand(-1, top_k, -1).clone()
    without.diagonal(dim1=1, dim2=2).zero_()
    gates, growth = likely[:, :top_k], None
    if rule == "normalised":
        without = without / without.sum(-1, keepdim=True)
        gates = gates / gates.sum(-1, keepdim=True)
    elif rule == "softmax":
        without = without / (1 - gates[..., None]).clamp_min(torch.finfo(torch.float64).eps)
        others = scores.double().scatter(-1, experts[:, :top_k], 0.0)
        growth = (others / (1 - others)).float()
    return Routed(experts, gates.float(), without.float(), num_experts, growth)


def outputs_of(routed: Routed, inputs: torch.Tensor, expert_output: ExpertOutput) -> torch.Tensor:
    """Return the outputs `(t, k + 1, d)` float32 of the experts of every token, from its input `(t, d)`."""
    outputs = torch.zeros(routed.experts.numel() + 1, inputs.shape[-1], device=inputs.device)  # one for padded pairs
    placed = Placement.of(routed.experts, routed.num_experts)
    for block in placed.blocks:
        written = expert_output(block.experts, inputs[block.of(placed.tokens)])
        outputs[block.of(placed.pairs)] = written.float()
    return outputs[:-1].view(*routed.experts.shape, -1)


class ExpertSums:
    """Sums over the tokens of a layer that scores and effects of its E experts come from.

    Sums of several parts of a text are added, and peaks are compared.

    Attributes:
        tokens: float64 `(E,)`: routed tokens.
        gated_norms, norms: float64 `(E,)`: sums of `g_e ‖o_e‖` and `‖o_e‖` over routed tokens.
        energies: float64 `(E,)`: sums of `g_e² ‖o_e‖²`.
        peaks: float32 `(E,)`: the largest entry of `|o_e|`.
        effects: float64 `(E, E)`: R.
    """

    def __init__(self, num_experts: int, device: torch.device | None = None) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.tokens, self.gated_norms, self.norms, self.energies = (zeros(num_experts) for _ in range(4))
        self.peaks = torch.zeros(num_experts, device=device)
        self.effects = zeros(num_experts, num_experts)

    def add_(
        self, routed: Routed, outputs: torch.Tensor, seen: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Add a batch.

        Args:
            outputs: `(t, k + 1, d)`, of `outputs_of`.
            seen: makes what the stream loses of effects `(t, k, d)`, where norms follow the experts; not for the rule
                `softmax`.

        Memory: `2 t k d` numbers of float32 for the effects of the batch, and `3 t k E` for their places in R.
        """
        top_k = routed.gates.shape[1]
        places = torch.nn.functional.one_hot(routed.experts[:, :top_k], len(self.tokens)).float()  # (t, k, E)
        norms = outputs[:, :top_k].norm(dim=-1)
        gated = routed.gates * norms
        for total, values in (
            (self.tokens, torch.ones_like(norms)),
            (self.gated_norms, gated),
            (self.norms, norms),
            (self.energies, gated.square()),
        ):
            add_product_(total[:, None], places.flatten(0, 1), values.reshape(-1, 1))
        peaks = outputs[:, :top_k].abs().amax(-1)
        self.peaks = torch.maximum(self.peaks, (places * peaks[..., None]).amax((0, 1)))
        self._add_effects_(routed, outputs, places, seen)

    def of_all(self, workers: Workers) -> "ExpertSums":
        """Return the sums over the text of all workers."""
        workers.sum_(self.tokens, self.gated_norms, self.norms, self.energies, self.effects)
        self.peaks = torch.stack(workers.gather((self.peaks,))).amax(0)
        return self

    def _add_effects_(
        self,
        routed: Routed,
        outputs: torch.Tensor,
        places: torch.Tensor,
        seen: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """Add to R: of every token, its own experts' effects, and `−c_e y` of the experts that it does not have."""
        top_k = routed.gates.shape[1]
        change = -routed.gates_without
        change[..., :top_k] += routed.gates[:, None]
        effects = change @ outputs  # r_i of the token's experts (t, k, d)
        effects = effects if seen is None else seen(effects)
        products = effects @ effects.mT  # (t, k, k)
        add_product_(self.effects, places.flatten(0, 1), (products @ places).flatten(0, 1))
        if routed.growth is not None:
            assert seen is None
            whole = routed.gates[:, None] @ outputs[:, :top_k]  # y (t, 1, d)
            along = (effects @ whole.mT).mT @ places  # ⟨r_e, y⟩ (t, 1, E)
            size = whole.norm(dim=-1)
            add_product_(self.effects, routed.growth * size, routed.growth * size)
            add_product_(self.effects, -routed.growth, along[:, 0])
            add_product_(self.effects, along[:, 0], -routed.growth)


def draw(sums: ExpertSums, generator: torch.Generator) -> torch.Tensor:
    """Return a random score for every expert, float64 `(E,)`."""
    return torch.rand(len(sums.tokens), dtype=torch.float64, generator=generator).to(sums.tokens.device)


EXPERT_SCORES: dict[ExpertSelector, Callable[[ExpertSums, torch.Generator], torch.Tensor]] = {
    "frequency": lambda sums, _: sums.tokens,
    "reap": lambda sums, _: sums.gated_norms / sums.tokens.clamp_min(1),
    "man": lambda sums, _: sums.norms / sums.tokens.clamp_min(1),
    "energy": lambda sums, _: sums.energies,
    "random": draw,
    "effects": lambda sums, _: sums.effects.diagonal(),
}
"""A score for every expert, float64 `(E,)`; the experts with the largest scores stay.

`frequency`: routed tokens. `reap`: the mean of `g ‖o‖` over routed tokens (REAP, Lasby et al. 2025, 2510.13999). `man`:
the mean of `‖o‖` over routed tokens (Mean Activation Norm, Liu et al. 2026, 2606.15716). `energy`: the sum of
`g² ‖o‖²`. `random`: a draw. `effects`: `Σ ‖r_e‖²` of the expert alone. An expert without tokens has the score 0.
"""


def super_experts(peaks: torch.Tensor) -> torch.Tensor:
    """Return which experts have a peak above `OUTLIER` times the median of those above 0, bool `(E,)`.

    Removing such experts destroys a model (Su et al. 2025, 2507.23279, who compare peaks with the whole model's).
    """
    alive = peaks[peaks > 0]
    if not len(alive):
        return torch.zeros_like(peaks, dtype=torch.bool)
    return peaks > OUTLIER * alive.median()


def removed_experts(
    selector: ExpertSelector, sums: ExpertSums, num_removed: int, generator: torch.Generator, *, keep_super: bool = True
) -> list[int]:
    """Choose the experts of a layer to remove, ascending.

    `effects` takes the set with the least joint effect, the other selectors the experts with the smallest scores.
    Equal scores: the smallest number goes. `keep_super` makes super experts no candidates, as far as others are enough.
    """
    kept = super_experts(sums.peaks).cpu()
    if not keep_super or num_removed > int((~kept).sum()):
        kept = torch.zeros_like(kept)
    if selector == "effects":
        return least_removal(sums.effects, num_removed, kept=kept).tolist()
    scores = EXPERT_SCORES[selector](sums, generator).cpu().masked_fill(kept, torch.inf)
    return sorted(scores.argsort(stable=True)[:num_removed].tolist())
