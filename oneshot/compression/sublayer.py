"""Say what is to be done with a sublayer, for all mixers alike.

`LayerCompressor` calls the methods of a task in order: `reductions`, `measure`, `solve`, `fold`. `one_writer` has them
for attention and an FFN (`tasks`), `experts` for a mixture.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from oneshot.architecture import Carried, ModelShape, RankedKind, Stack, Sublayer
from oneshot.checkpoint.quantisation import Quantisation
from oneshot.compression.curvature import LayerCurvature
from oneshot.compression.inner_heads import InnerMaps
from oneshot.compression.ranks import Ranks
from oneshot.compression.statistics import batches_apart, damping_of
from oneshot.compression.subspaces import StreamSubspaces
from oneshot.machine import Machine
from oneshot.method import TOKENS_PER_NEURON, Method, SelectorName
from oneshot.planning import LayerPlan, Plan
from oneshot.report.records import SublayerReport
from oneshot.selection import Need, find_selector, needs_of, reads_activations
from oneshot.stream import DensePass, Layer, States
from oneshot.tensors import Tensors

LEAST_DAMPING = 1e-3

Solution = TypeVar("Solution")


@dataclass
class LayerWork:
    """A layer while it is compressed.

    Attributes:
        working: the tensors that the compressed stream passes. maps, ranks: of heads and of linears of low rank, by the
            sublayer's index; they are folded at the end. reports: what was lost.
        inputs: Grams `(D, D)` of what a sublayer's linears read, by its index, as far as they are known.
        scales: of rounded weights, by their names. rounding_errors: relative errors of their outputs, by linear.
    """

    working: Tensors
    maps: dict[int, InnerMaps] = field(default_factory=dict)
    ranks: dict[int, Ranks] = field(default_factory=dict)
    reports: list[SublayerReport] = field(default_factory=list)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    scales: Tensors = field(default_factory=dict)
    rounding_errors: dict[str, float] = field(default_factory=dict)


Reduction = Callable[[LayerWork, States, Layer], None]
"""Changes a layer, whose present state is the last argument, by a pass over the text before its writer is measured."""


@dataclass(frozen=True)
class SublayerTask:
    """The compression of one sublayer of one layer: its sizes in the plan, and what it is computed with.

    This class itself is the task of a carried mixer, which stays as it is.

    `shared_heads`: the heads that stay, if they were chosen for all layers of the stack; else None. `curvature`: of the
    layer, if it was measured; else None. `has_dense`: whether the dense stream passes beside the compressed one.
    `layers_before`: layers of another model before this one's first, which messages count. `quantisation`: of linears,
    if what is folded at the end leaves rounded weights as they are; else None.
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
    quantisation: Quantisation | None = None

    @property
    def sublayer(self) -> Sublayer:
        return self.stack.sublayers[self.index]

    @property
    def mixer(self) -> Any:
        """Return the mixer of the sublayer; subclasses state its kind."""
        return self.sublayer.mixer

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
    def dense_units(self) -> int:
        """Return the dense model's heads or neurons."""
        return 1

    @property
    def kept_units(self) -> int:
        """Return the heads or neurons that stay."""
        return 1

    @property
    def selector(self) -> SelectorName:
        """Return the name of what chooses heads or neurons."""
        return "none"

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
        return {kind: rank for kind, rank in self.kept.ranks.items() if kind in self.mixer.ranked}

    @property
    def corrects_slices(self) -> bool:
        """Return whether the writer is corrected for a smaller hidden size, even if all its columns stay."""
        return self.subspaces is not None and self.method.follows_dense

    @property
    def is_solved(self) -> bool:
        """Return whether the writer changes, so that statistics of its input are needed."""
        if isinstance(self.mixer, Carried):
            return False
        remains = self.loses_experts and self.method.solves
        return self.is_reduced or self.smaller_values is not None or self.corrects_slices or remains

    @property
    def passes(self) -> int:
        """Return how many passes over the text the writer is measured in."""
        return int(self.is_solved)

    def all_passes(self, states: States) -> float:
        """Return how many passes over the text the whole sublayer takes."""
        return self.passes

    @property
    def follows_dense(self) -> bool:
        """Return whether the target comes from the dense stream."""
        return self.has_dense and self.method.follows_dense

    @property
    def corrects_up(self) -> bool:
        """Return whether `up_proj` is also corrected."""
        return False

    @property
    def reductions(self) -> list[Reduction]:
        """Return what changes the layer before the writer is measured, in order."""
        return []

    def measure(
        self, tensors: Tensors, states: States, current: Layer, reference: Layer, dense: DensePass
    ) -> tuple[Any, torch.Tensor | None]:
        """Sum the statistics of what the writer reads; also return what the sublayer should add to the judged batch.

        None if this worker has no batch of the stream that makes the target.

        Args:
            current: the layer that the compressed stream passes. reference: the layer before any reduction, which
                makes the target if the dense stream does not. dense: the dense stream's deferred pass.
        """
        raise NotImplementedError

    def solve(self, tensors: Tensors, statistics: Any) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        """Return the kept units, the factors, and the values' subspaces if they shrink, in all processes.

        `statistics` are what `measure` returned, or None for a choice by weights alone.
        """
        raise NotImplementedError

    def fold(self, tensors: Tensors, factors: Any) -> Tensors:
        """Return the layer with the kept units and the corrected writer."""
        raise NotImplementedError

    def keep_(self, work: LayerWork, units: torch.Tensor, values: torch.Tensor | None) -> None:
        """Keep of the maps and of the linears of low rank what belongs to the units that stay."""

    def target_of(self, x: torch.Tensor, dense: DensePass) -> torch.Tensor:
        """Return what the sublayer should add to `x`, a batch of the compressed stream.

        It leads to the dense stream after the sublayer, and so also corrects what earlier sublayers lost. With
        `residual_target="sublayer"` it is what the dense sublayer adds to its own input (STAT section 3.1).
        """
        return dense.sum - (x if self.method.residual_target == "stream" else dense.before)

    @property
    def rounds(self) -> bool:
        """Return whether linears are rounded between the passes; those that change later are rounded at the end."""
        return False

    def every(self, states: States) -> int:
        """Return n if each n-th batch is read for ranks, and for rounding."""
        return batches_apart(states.stack_tokens, self.shape.hidden_size)

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

    def shrinkage(self, num_columns: int, num_rows: int) -> float:
        """Return the share that is chance of what different columns have in common, by which neurons are chosen."""
        return 0.0

    def holds_out(self, num_columns: int, num_rows: int) -> bool:
        """Return whether a part of the text is held out, which says how much is corrected."""
        return self.method.holds_out


def trusted_share(num_columns: int, num_tokens: float) -> float:
    """Return the share of a residual over so many columns that is not noise of its tokens."""
    return max(0.0, 1 - TOKENS_PER_NEURON * num_columns / num_tokens)


def shrinks(method: Method) -> bool:
    """Return whether a Gram of few tokens shrinks towards its diagonal, and held-out ones say how much is corrected.

    It does not beside STAT's own target and a damping below `LEAST_DAMPING`, which are against rounding alone, and
    beside `damping=auto`, which chooses by itself. With sizes from a profile it gained nothing (one seed).
    """
    chooses = method.solves and method.residual_target == "stream" and not method.holds_out
    return chooses and not method.reads_profile and method.fixed_damping >= LEAST_DAMPING


def takes_sketch(method: Method) -> bool:
    """Return whether neurons are chosen by a sketch of the activations."""
    selector = find_selector(method.ffn)
    return selector is not None and selector.takes_sketch and method.sketch != "none"


def needs_statistics(method: Method) -> bool:
    """Return whether removing neurons or heads needs the text: not if weights alone choose and nothing is corrected."""
    by_weights = not reads_activations(method.ffn) and method.heads == "none" and not method.reduces_experts
    return not (by_weights and method.correction == "none")
