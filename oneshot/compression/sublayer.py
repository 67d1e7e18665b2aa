"""Say what is to be done with a sublayer, for all mixers alike; `tasks` has a class for each type of mixer.

`measuring.measure` sums statistics of the activations that the sublayer's writer reads. `solving.solve` selects the
columns that stay and corrects the writer over them. `fold.fold_sublayer` makes the smaller tensors of it. `ways.Way`
is these three.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from oneshot.architecture import ModelShape, RankedKind, Stack, Sublayer
from oneshot.compression.curvature import LayerCurvature
from oneshot.compression.inner_heads import InnerMaps
from oneshot.compression.ranks import Ranks
from oneshot.compression.statistics import damping_of
from oneshot.compression.subspaces import StreamSubspaces
from oneshot.machine import Machine
from oneshot.method import TOKENS_PER_NEURON, Method, SelectorName
from oneshot.planning import LayerPlan, Plan
from oneshot.selection import Need, find_selector, needs_of, reads_activations

Solution = TypeVar("Solution")


@dataclass(frozen=True)
class SublayerTask(ABC):
    """The compression of one sublayer of one layer: its sizes in the plan, and what it is computed with.

    `shared_heads`: the heads that stay, if they were chosen for all layers of the stack; else None. `curvature`: of the
    layer, if it was measured; else None. `has_dense`: whether the dense stream passes beside the compressed one.
    `layers_before`: layers of another model before this one's first, which messages count.
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
    has_dense: bool = True
    layers_before: int = 0

    @property
    def sublayer(self) -> Sublayer:
        return self.stack.sublayers[self.index]

    @property
    def kept(self) -> LayerPlan:
        """Return the layer's sizes in the plan."""
        return self.plan.layers[self.layer]

    @property
    def number(self) -> int:
        """Return the number of the layer in messages."""
        return self.layers_before + self.layer

    @property
    def position(self) -> int:
        """Return the residual stream's position before the sublayer."""
        return self.stack.position(self.layer, self.index)

    @property
    @abstractmethod
    def dense_units(self) -> int:
        """Return the dense model's heads or neurons."""

    @property
    @abstractmethod
    def kept_units(self) -> int:
        """Return the heads or neurons that stay."""

    @property
    @abstractmethod
    def selector(self) -> SelectorName:
        """Return the name of what chooses heads or neurons."""

    @property
    def num_columns(self) -> int:
        """Return the columns of the dense writer."""
        return self.dense_units

    def needs(self, need: Need) -> bool:
        """Return whether the sublayer loses units that are chosen by this evidence."""
        return self.is_reduced and need in needs_of(self.selector)

    @property
    def takes_sketch(self) -> bool:
        """Return whether neurons are chosen by a sketch of the activations."""
        return False

    @property
    def is_reduced(self) -> bool:
        """Return whether the sublayer loses heads or neurons, and others stay."""
        return 0 < self.kept_units < self.dense_units

    @property
    def loses_experts(self) -> bool:
        """Return whether the sublayer is a mixture that loses whole experts."""
        return False

    @property
    def is_left_out(self) -> bool:
        """Return whether the whole sublayer goes: the stream passes it unchanged."""
        return self.kept_units == 0

    @property
    def smaller_scores(self) -> int | None:
        """Return the kept size of queries and keys; None if they stay full."""
        return None

    @property
    def smaller_values(self) -> int | None:
        """Return the kept size of values; None if they stay full."""
        return None

    @property
    def ranks(self) -> dict[RankedKind, int]:
        """Return the ranks of the sublayer's linears that are not whole."""
        return {kind: rank for kind, rank in self.kept.ranks.items() if kind in self.sublayer.mixer.ranked}

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
    def passes(self) -> int:
        """Return how many passes over the text the writer is measured in."""
        return int(self.is_solved)

    @property
    def follows_dense(self) -> bool:
        """Return whether the target comes from the dense stream."""
        return self.has_dense and self.method.follows_dense

    @property
    def corrects_up(self) -> bool:
        """Return whether `up_proj` is also corrected."""
        return False

    def maps_after(self, maps: InnerMaps, units: torch.Tensor, values: torch.Tensor | None) -> InnerMaps:
        """Return the maps of the heads that stay, with the subspaces of their values."""
        return maps

    def ranks_after(self, ranks: Ranks, units: torch.Tensor) -> Ranks:
        """Return the linears of low rank of the neurons that stay."""
        return ranks

    def shared(self, solve: Callable[[], Solution]) -> Solution:
        """Return what one worker solves, on the device of each."""
        return self.machine.workers.share(self.position, solve)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the compressed stream after the sublayer, in the subspace of the next position."""
        if self.subspaces is None or self.stack.norms_after:  # such norms project the stream themselves
            return x
        return self.subspaces.enter(x, self.position + 1)

    @property
    def asked_residual_weight(self) -> float:
        """Return the share of the dense stream's residual that the method asks for."""
        return self.method.residual_weight

    def residual_weight(self, num_columns: int, num_tokens: int) -> float:
        """Return the share of the dense stream's residual in the target; less of it if its tokens are few.

        From few tokens the residual is mostly noise, so it is left out below `TOKENS_PER_NEURON` of them for each
        column. A stream inside subspaces has more to correct and takes the whole share, and so does STAT's own target.
        """
        asked = self.asked_residual_weight
        if not num_tokens or self.corrects_slices or self.method.residual_target == "sublayer":
            return asked
        return asked * trusted_share(num_columns, num_tokens)

    def damping(self, num_columns: int, num_rows: int) -> float:
        """Return the damping of the output linear's correction; more if its tokens are few.

        STAT's own target keeps its ridge, which is against rounding alone.
        """
        asked = self.method.fixed_damping
        return asked if self.method.residual_target == "sublayer" else damping_of(asked, num_columns, num_rows)


def trusted_share(num_columns: int, num_tokens: float) -> float:
    """Return the share of a residual over so many columns that is not noise of its tokens."""
    return max(0.0, 1 - TOKENS_PER_NEURON * num_columns / num_tokens)


def takes_sketch(method: Method) -> bool:
    """Return whether neurons are chosen by a sketch of the activations."""
    selector = find_selector(method.ffn)
    return selector is not None and selector.takes_sketch and method.sketch != "none"


def needs_statistics(method: Method) -> bool:
    """Return whether removing neurons or heads needs the text: not if weights alone choose and nothing is corrected."""
    by_weights = not reads_activations(method.ffn) and method.heads == "none" and not method.reduces_experts
    return not (by_weights and method.correction == "none")
