"""One way through a sublayer, for attention and FFN alike: measure, select, correct, fold.

`measure` sums statistics of the activations that the sublayer's writer reads. `solve` selects the columns that stay
and corrects the writer over them. `fold.fold_sublayer` makes the smaller tensors of it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from oneshot.compression.correction import Factors, best_damping, correct, correct_heads, predicted_error
from oneshot.compression.fold import augmented_weight, fold_sublayer, head_columns, row_energy
from oneshot.compression.inner_heads import value_subspaces
from oneshot.compression.selection import Evidence, select_heads, select_neurons
from oneshot.compression.statistics import (
    GramAccumulator,
    HeadGramAccumulator,
    MomentAccumulator,
    SketchAccumulator,
    SplitAccumulator,
    Statistics,
    with_constant_column,
)
from oneshot.compression.subspaces import StreamSubspaces
from oneshot.families import Attention, FeedForward, ModelShape, RankedKind, Stack, Sublayer
from oneshot.machine import Machine
from oneshot.planning import LayerPlan, Plan
from oneshot.recipes import MOMENT_SELECTORS, TOKENS_PER_NEURON, WEIGHT_SELECTORS, Method, Selector
from oneshot.stream import DensePass, Layer, States

logger = logging.getLogger(__name__)

NONZEROS = {"count": 1, "sparse-sign": 8}  # per column of the sketching matrix

Solution = TypeVar("Solution")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SublayerTask:
    """The compression of one sublayer of one layer: its sizes in the plan, and what it is computed with.

    `shared_heads`: the heads that stay, if they were chosen for all layers of the stack; else None.
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
    def dense_units(self) -> int:
        """Return the dense model's heads or neurons."""
        return self.shape.num_attention_heads if self.is_attention else self.shape.intermediate_size

    @property
    def kept_units(self) -> int:
        """Return the heads or neurons that stay."""
        return self.kept.num_attention_heads if self.is_attention else self.kept.intermediate_size

    @property
    def num_columns(self) -> int:
        """Return the columns of the dense writer."""
        return self.dense_units * (self.shape.head_dim if self.is_attention else 1)

    @property
    def selector(self) -> Selector:
        return self.method.heads if self.is_attention else self.method.ffn

    @property
    def is_reduced(self) -> bool:
        """Return whether the sublayer loses heads or neurons, and others stay."""
        return 0 < self.kept_units < self.dense_units

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
        return self.is_reduced or self.smaller_values is not None or self.corrects_slices

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

    def measure(
        self, tensors: Tensors, states: States, current: Layer, reference: Layer, dense: DensePass
    ) -> tuple[Statistics, torch.Tensor | None]:
        """Sum the statistics of what the writer reads; also return what the sublayer should add to the judged batch.

        None if this worker has no batch of the dense stream, which makes the target.

        Args:
            current: the layer that the compressed stream passes. reference: the layer before any reduction, which
                makes the target if the dense stream does not. dense: the dense stream's deferred pass.
        """
        weight = augmented_weight(tensors, self.sublayer.writer)
        has_bias = weight.shape[1] > self.num_columns
        accumulator = self._accumulator(weight, states)
        sketch, moments = self._sketch(states), None
        if self.selector in MOMENT_SELECTORS:
            moments = MomentAccumulator(self.num_columns, device=self.machine.device)
        values = self._value_accumulator()
        target = None
        for x, dense_state in states.read():
            inner, lost = current.inner(self.index, x), None
            if self.follows_dense and dense_state is not None:
                target = self._target(x, dense)
                lost = target.flatten(0, -2) - current.write(self.index, inner)
            accumulator.update_(with_constant_column(inner) if has_bias else inner, lost)
            if sketch is not None:
                sketch.update_(inner)
            if moments is not None:
                moments.update_(inner)
            if values is not None:
                values.update_(current.values(self.index, x))
        if not self.follows_dense:
            judged, _ = states.read_judged()
            target = reference.sum(self.index, judged) - judged
        workers = self.machine.workers
        statistics = replace(
            self._reachable(accumulator.finish(workers)),
            sketch=None if sketch is None else sketch.finish(workers),
            moments=None if moments is None else moments.finish(workers),
            value_grams=None if values is None else values.finish(workers),
        )
        self._warn_if_dead(statistics.gram)
        return statistics, target

    def solve(
        self, tensors: Tensors, statistics: Statistics | None
    ) -> tuple[torch.Tensor, Factors, torch.Tensor | None]:
        """Return the kept units, the factors, and the values' subspaces if they shrink; one worker solves, for all.

        `statistics` are None for a choice by weights alone.
        """

        def solve() -> tuple[torch.Tensor, Factors, torch.Tensor | None]:
            weight = augmented_weight(tensors, self.sublayer.writer).to(self.machine.device)
            units, columns = self._select(tensors, weight, statistics)
            factors = self._correct(weight, columns, statistics)
            if self.smaller_values is None:
                return units, factors, None
            assert statistics is not None
            return units, *self._reduce_values(weight, units, columns, factors, statistics, self.smaller_values)

        return self.shared(solve)

    def fold(self, tensors: Tensors, factors: Factors) -> Tensors:
        """Return the layer with the sublayer's kept columns and corrected writer."""
        return fold_sublayer(tensors, self.sublayer, self.shape, factors)

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
        if not num_tokens or self.corrects_slices or self.method.residual_target == "sublayer":
            return self.method.residual_weight
        return self.method.residual_weight * max(0.0, 1 - TOKENS_PER_NEURON * num_columns / num_tokens)

    def _target(self, x: torch.Tensor, dense: DensePass) -> torch.Tensor:
        """Return what the sublayer should add to a batch of the compressed stream.

        It leads to the dense stream after the sublayer, and so also corrects what earlier sublayers lost. With
        `residual_target="sublayer"` it is what the dense sublayer adds to its own input (STAT section 3.1).
        """
        return dense.sum - (x if self.method.residual_target == "stream" else dense.before)

    def _accumulator(self, weight: torch.Tensor, states: States) -> GramAccumulator | SplitAccumulator:
        """Return the sums of what a writer `weight (d, n)` reads."""
        device, (output_size, size) = self.machine.device, weight.shape
        target_size = output_size if self.follows_dense else None
        if self.method.holds_out:
            return SplitAccumulator(size, output_size=target_size, device=device, first_batch=states.first_batch)
        return GramAccumulator(size, output_size=target_size, device=device)

    def _sketch(self, states: States) -> SketchAccumulator | None:
        if self.is_attention or not self.is_reduced or self.method.sketch == "none":
            return None
        return SketchAccumulator(
            self.method.rows_of_sketch(self.num_columns),
            self.num_columns,
            nonzeros=NONZEROS[self.method.sketch],
            seed=self.seed,
            device=self.machine.device,
            row_offset=states.first_row,
        )

    def _value_accumulator(self) -> HeadGramAccumulator | None:
        """Return the sums of the values themselves, if their subspaces come from them."""
        if self.smaller_values is None or self.method.value_features == "heads":
            return None
        return HeadGramAccumulator(self.shape.num_key_value_heads, self.shape.head_dim, device=self.machine.device)

    def _reachable(self, statistics: Statistics) -> Statistics:
        """Return the residual within the subspace that the sublayer writes to; its energy also counts the rest."""
        if self.subspaces is None or self.stack.norms_after or statistics.residual is None:
            return statistics
        inside = self.subspaces.inside(statistics.residual, self.position + 1)
        held_out = None if statistics.held_out is None else self._reachable(statistics.held_out)
        return replace(statistics, residual=inside, held_out=held_out)

    def _select(
        self, tensors: Tensors, weight: torch.Tensor, statistics: Statistics | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the units that stay, ascending, and their columns."""
        units = torch.arange(self.dense_units, device=self.machine.device)
        if self.is_reduced and self.shared_heads is not None:
            units = self.shared_heads
        elif self.is_reduced:
            generator = torch.Generator().manual_seed(self.seed + self.layer)
            evidence = Evidence(
                consumer=weight[:, : self.num_columns],
                producer_energy=self._producer_energy(tensors) if self.selector == "magnitude" else None,
                gram=None if statistics is None else statistics.gram[: self.num_columns, : self.num_columns],
                generator=generator,
                moments=None if statistics is None else statistics.moments,
                sketch=None if statistics is None else statistics.sketch,
                pivoting=self.method.pivoting,
                group_size=self.method.pivot_group_size,
                pivot_weights=self.method.pivot_weights,
            )
            if self.is_attention:
                units = select_heads(
                    self.selector,
                    evidence,
                    num_groups=self.shape.num_key_value_heads,
                    heads_per_group=self.shape.heads_per_group,
                    kept_groups=self.kept.num_key_value_heads,
                    kept_heads_per_group=self.kept.num_attention_heads // self.kept.num_key_value_heads,
                )
            else:
                units = select_neurons(self.selector, self.kept_units, evidence)
        return units, head_columns(units, self.shape.head_dim) if self.is_attention else units

    def _producer_energy(self, tensors: Tensors) -> torch.Tensor:
        """Return the squared norms of the rows that make each column of the writer."""
        mixer = self.sublayer.mixer
        if isinstance(mixer, FeedForward):
            return row_energy(tensors, *mixer.readers).to(self.machine.device)
        group_of_head = torch.arange(self.shape.num_attention_heads) // self.shape.heads_per_group
        values = row_energy(tensors, mixer.v).view(-1, self.shape.head_dim)
        return values[group_of_head].flatten().to(self.machine.device)

    def _correct(self, weight: torch.Tensor, columns: torch.Tensor, statistics: Statistics | None) -> Factors:
        """Correct the writer over the kept columns; its bias is a last column that stays."""
        has_bias = weight.shape[1] > self.num_columns
        if has_bias:
            columns = torch.cat((columns, columns.new_tensor([weight.shape[1] - 1])))
        if self.is_attention and self.is_reduced and self.method.heads_correction == "head-level":
            assert statistics is not None
            return correct_heads(
                weight, columns, statistics, head_dim=self.shape.head_dim, damping=self.method.fixed_damping
            )
        correction = self.method.correction
        if correction == "two-stream" and not self.follows_dense:
            correction = "same-layer"
        if correction == "bias" and not has_bias:
            correction = "none"
        share = self.residual_weight(weight.shape[1], 0 if statistics is None else statistics.num_targets)
        damping = self.method.fixed_damping
        if statistics is not None and statistics.held_out is not None:
            damping = best_damping(weight, columns, statistics, correction=correction, residual_weight=share)
        return correct(weight, columns, statistics, correction=correction, damping=damping, residual_weight=share)

    def _reduce_values(
        self,
        weight: torch.Tensor,
        heads: torch.Tensor,
        columns: torch.Tensor,
        factors: Factors,
        statistics: Statistics,
        size: int,
    ) -> tuple[Factors, torch.Tensor]:
        """Return the factors of a writer that reads values in subspaces of `size` coordinates, and the subspaces."""
        grams = statistics.value_grams
        if grams is not None:
            grams = grams[(heads // self.shape.heads_per_group).unique()]
        values, restricted = value_subspaces(
            factors.weight[:, : len(columns)],
            statistics.gram[columns.unsqueeze(1), columns],
            num_groups=self.kept.num_key_value_heads,
            head_dim=self.shape.head_dim,
            size=size,
            value_grams=grams,
            weighted=self.method.value_weights == "output",
            correct=self.method.solves,
            damping=self.method.fixed_damping,
        )
        new_weight = torch.cat((restricted, factors.weight[:, len(columns) :]), dim=1)
        error = predicted_error(weight.double(), new_weight, factors.kept_columns, statistics)
        return replace(factors, weight=new_weight, predicted_error=error), values

    def _warn_if_dead(self, gram: torch.Tensor) -> None:
        """Warn if more columns are zero on the whole text than are removed, because the rest is an arbitrary choice."""
        diagonal = gram.diagonal()[: self.num_columns]
        kept_columns = self.kept_units * self.num_columns // self.dense_units
        dead, removed = int((diagonal == 0).sum()), self.num_columns - kept_columns
        if dead > removed:
            logger.warning(
                "Layer %d, %s: %d of %d columns are zero on the whole calibration text, more than the %d removed.",
                self.layer,
                self.sublayer.kind,
                dead,
                self.num_columns,
                removed,
            )


def needs_statistics(method: Method) -> bool:
    """Return whether removing neurons or heads needs the text: not if weights alone choose and nothing is corrected."""
    return not (method.ffn in WEIGHT_SELECTORS and method.heads == "none" and method.correction == "none")


def relative_error(target: torch.Tensor, reached: torch.Tensor) -> float:
    """Return `‖target − reached‖ / ‖target‖`."""
    energy = target.double().norm().clamp_min(torch.finfo(torch.float64).tiny)  # a sublayer may output zeros
    return float((target - reached).double().norm() / energy)
