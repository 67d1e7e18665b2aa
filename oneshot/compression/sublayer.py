"""Say what is to be done with a sublayer, for attention and FFN alike.

`measuring.measure` sums statistics of the activations that the sublayer's writer reads. `solving.solve` selects the
columns that stay and corrects the writer over them. `fold.fold_sublayer` makes the smaller tensors of it. `ways.Way`
is these three.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from oneshot.compression.curvature import LayerCurvature
from oneshot.compression.subspaces import StreamSubspaces
from oneshot.families import Attention, Experts, FeedForward, ModelShape, RankedKind, Stack, Sublayer
from oneshot.machine import Machine
from oneshot.planning import LayerPlan, Plan
from oneshot.recipes import TOKENS_PER_NEURON, Method, SelectorName
from oneshot.selection import Need, find_selector, needs_of, reads_activations

Solution = TypeVar("Solution")


@dataclass(frozen=True)
class SublayerTask:
    """The compression of one sublayer of one layer: its sizes in the plan, and what it is computed with.

    `shared_heads`: the heads that stay, if they were chosen for all layers of the stack; else None. `curvature`: of the
    layer, if it was measured; else None.
    """

    method: Method
    shape: ModelShape
    plan: Plan
    subspaces: StreamSubspaces | None
    machine: Machine
    stack: Stack
    layer: int
    index: int
    seed: int
    shared_heads: torch.Tensor | None = None
    curvature: LayerCurvature | None = None

    @property
    def sublayer(self) -> Sublayer:
        return self.stack.sublayers[self.index]

    @property
    def kept(self) -> LayerPlan:
        """Return the layer's sizes in the plan."""
        return self.plan.layers[self.layer]

    @property
    def position(self) -> int:
        """Return the residual stream's position before the sublayer."""
        return self.stack.position(self.layer, self.index)

    @property
    def is_attention(self) -> bool:
        return isinstance(self.sublayer.mixer, Attention)

    @property
    def is_dense_in_mixture(self) -> bool:
        """Return whether the sublayer is the one FFN of a layer in a mixture of experts; it stays as it is."""
        return isinstance(self.sublayer.mixer, FeedForward) and self.shape.experts is not None

    @property
    def dense_units(self) -> int:
        """Return the dense model's heads or neurons."""
        of_layer = self.shape.layer(self.layer)
        return of_layer.num_attention_heads if self.is_attention else of_layer.intermediate_size

    @property
    def kept_units(self) -> int:
        """Return the heads or neurons that stay."""
        if self.is_dense_in_mixture:
            return self.dense_units
        return self.kept.num_attention_heads if self.is_attention else self.kept.intermediate_size

    @property
    def num_columns(self) -> int:
        """Return the columns of the dense writer."""
        return self.dense_units * (self.shape.head_dim if self.is_attention else 1)

    @property
    def selector(self) -> SelectorName:
        return self.method.heads if self.is_attention else self.method.ffn

    def needs(self, need: Need) -> bool:
        """Return whether the sublayer loses units that are chosen by this evidence."""
        return self.is_reduced and need in needs_of(self.selector)

    @property
    def takes_sketch(self) -> bool:
        """Return whether neurons are chosen by a sketch of the activations."""
        return not self.is_attention and self.is_reduced and takes_sketch(self.method)

    @property
    def is_reduced(self) -> bool:
        """Return whether the sublayer loses heads or neurons, and others stay."""
        return 0 < self.kept_units < self.dense_units

    @property
    def loses_experts(self) -> bool:
        """Return whether the sublayer is a mixture that loses whole experts."""
        experts, kept = self.shape.experts, self.kept.num_experts
        is_mixture = isinstance(self.sublayer.mixer, Experts)
        return is_mixture and experts is not None and kept is not None and kept < experts.count

    @property
    def is_left_out(self) -> bool:
        """Return whether the whole sublayer goes: the stream passes it unchanged."""
        return self.kept_units == 0

    @property
    def smaller_values(self) -> int | None:
        """Return the kept size of values; None if they stay full."""
        return self.kept.value_size if self.is_attention else None

    @property
    def ranks(self) -> dict[RankedKind, int]:
        """Return the ranks of the sublayer's linears that are not whole."""
        return {kind: rank for kind, rank in self.kept.ranks.items() if kind in self.sublayer.mixer.ranked_kinds}

    @property
    def corrects_slices(self) -> bool:
        """Return whether the writer is corrected for a smaller hidden size, even if all its columns stay."""
        return self.subspaces is not None and self.method.follows_dense

    @property
    def is_solved(self) -> bool:
        """Return whether the writer changes, so that statistics of its input are needed."""
        remains = self.loses_experts and self.method.solves
        return self.is_reduced or self.smaller_values is not None or self.corrects_slices or remains

    @property
    def follows_dense(self) -> bool:
        """Return whether the target comes from the dense stream.

        By default attention follows it only for a smaller hidden size: fewer heads that follow it diverge
        (docs/experiments.md).
        """
        if self.is_attention and self.method.heads_correction != "two-stream":
            return self.corrects_slices
        return self.method.follows_dense

    @property
    def corrects_up(self) -> bool:
        """Return whether `up_proj` is also corrected; the FFN's output is linear in it if there is a gate."""
        mixer = self.sublayer.mixer
        return (
            isinstance(mixer, FeedForward)
            and mixer.gate is not None
            and self.method.up_steps > 0
            and self.is_reduced
            and self.subspaces is None
        )

    def shared(self, solve: Callable[[], Solution]) -> Solution:
        """Return what one worker solves, on the device of each."""
        return self.machine.workers.share(self.position, solve)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the compressed stream after the sublayer, in the subspace of the next position."""
        if self.subspaces is None or self.stack.norms_after:  # such norms project the stream themselves
            return x
        return self.subspaces.enter(x, self.position + 1)

    def residual_weight(self, num_columns: int, num_tokens: int) -> float:
        """Return the share of the dense stream's residual in the target; less of it if its tokens are few.

        From few tokens the residual is mostly noise, so it is left out below `TOKENS_PER_NEURON` of them for each
        column. A stream inside subspaces has more to correct and takes the whole share, and so does STAT's own target.
        """
        of_experts = isinstance(self.sublayer.mixer, Experts)
        asked = self.method.expert_residual_weight if of_experts else self.method.residual_weight
        if not num_tokens or self.corrects_slices or self.method.residual_target == "sublayer":
            return asked
        return asked * max(0.0, 1 - TOKENS_PER_NEURON * num_columns / num_tokens)


def takes_sketch(method: Method) -> bool:
    """Return whether neurons are chosen by a sketch of the activations."""
    selector = find_selector(method.ffn)
    return selector is not None and selector.takes_sketch and method.sketch != "none"


def needs_statistics(method: Method) -> bool:
    """Return whether removing neurons or heads needs the text: not if weights alone choose and nothing is corrected."""
    by_weights = not reads_activations(method.ffn) and method.heads == "none" and not method.reduces_experts
    return not (by_weights and method.correction == "none")
