"""A sublayer whose one writer reads the rows of all tokens: measured, chosen, corrected and folded."""

import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial

import torch

from oneshot.architecture import Attention
from oneshot.compression.branch_norm import BranchNorm, seen_writer, unseen
from oneshot.compression.correction import Factors, best_damping, best_shrinkage, correct, predicted_error, with_error
from oneshot.compression.fold import augmented_weight, fold_sublayer
from oneshot.compression.inner_heads import value_subspaces
from oneshot.compression.ranks import RankAccumulator, with_ranks
from oneshot.compression.rounding_steps import round_readers_, round_writer_
from oneshot.compression.statistics import (
    GramAccumulator,
    HeadGramAccumulator,
    MomentAccumulator,
    SketchAccumulator,
    SplitAccumulator,
    Statistics,
    towards_diagonal,
    with_constant_column,
)
from oneshot.compression.sublayer import LayerWork, Reduction, SublayerTask
from oneshot.selection import Evidence
from oneshot.stream import DensePass, Layer, States
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)

NONZEROS = {"count": 1, "sparse-sign": 8}  # per column of the sketching matrix


class OneWriterTask(SublayerTask, ABC):
    """A sublayer whose one writer reads the rows of all tokens."""

    @property
    def neuron_curvature(self) -> torch.Tensor | None:
        """Return the output curvature by which neurons are chosen; None without it."""
        return None

    def columns_of(self, units: torch.Tensor) -> torch.Tensor:
        """Return the columns of heads or neurons, ascending."""
        return units

    @abstractmethod
    def choose(self, evidence: Evidence) -> torch.Tensor:
        """Return the heads or neurons that stay, ascending."""

    @abstractmethod
    def producer_energy(self, tensors: Tensors) -> torch.Tensor:
        """Return the squared norms of the rows that make each column of the writer."""

    @property
    def reductions(self) -> list[Reduction]:
        found: list[Reduction] = [self.lower_ranks_] if self.ranks else []
        found += [partial(round_readers_, self)] if self.rounds else []
        return found + ([partial(round_writer_, self)] if self.rounds and not self.is_solved else [])

    def all_passes(self, states: States) -> float:
        in_parts = bool(self.ranks) + (self.rounds and not self.ranks) + (self.rounds and not self.is_solved)
        return self.passes + in_parts * (1 + states.share_read(self.every(states)))

    @property
    def is_solved(self) -> bool:
        """Return whether the writer changes, if only to make up for what was rounded before it."""
        return super().is_solved or (self.rounds and self.follows_dense)

    @property
    def rounds(self) -> bool:
        changes = self.smaller_scores is not None or self.smaller_values is not None or self.corrects_up
        fixed = isinstance(self.mixer, Attention) and self.mixer.fixed_heads
        return self.quantisation is not None and not changes and not fixed

    def lower_ranks_(self, work: LayerWork, states: States, current: Layer) -> None:
        """Give linears their ranks. The pass reads some batches of the text, after the states moved on."""
        states.settle()
        sums = RankAccumulator(
            *(self.shape, self.sublayer, self.index, work.working, self.machine.device),
            has_curvature=self.curvature is not None,
        )
        for x, _ in states.read(self.every(states)):
            sums.update_(current, x)
        linears = sums.finish(self.machine.workers, self.curvature, shrinks=True)
        if self.rounds:
            work.inputs[self.index] = next(iter(linears.values())).inputs.gram
        jobs = [partial(linears[kind].nearest, rank) for kind, rank in self.ranks.items()]
        costs = [linears[kind].cost for kind in self.ranks]
        ranks = dict(zip(self.ranks, self.machine.workers.share_all(jobs, costs), strict=True))
        work.working, work.ranks[self.index] = with_ranks(work.working, self.mixer, ranks), ranks

    def measure(
        self, tensors: Tensors, states: States, current: Layer, reference: Layer, dense: DensePass
    ) -> tuple[Statistics, torch.Tensor | None]:
        # 1. The sums: the Gram and the residual, and what the selector and the values need beside them.
        weight, workers = augmented_weight(tensors, self.sublayer.writer), self.machine.workers
        has_bias = weight.shape[1] > self.num_columns
        accumulator, sketch, values, moments = self._accumulator(weight, states), self._sketch(states), None, None
        if self.needs("moments"):
            moments = MomentAccumulator(self.num_columns, device=self.machine.device)
        if self.smaller_values is not None and self.method.value_features == "values":
            values = HeadGramAccumulator(
                self.shape.num_key_value_heads, self.shape.head_dim, device=self.machine.device
            )
        target, branch_norm = None, BranchNorm.of(self.sublayer, tensors, self.machine.device)
        for x, dense_state in states.read():
            # 2. What the writer reads, and what its output lacks of the dense stream.
            inner, lost = current.inner(self.index, x), None
            written = current.write(self.index, inner) if self.follows_dense or branch_norm is not None else inner
            if self.follows_dense and dense_state is not None:
                target = self.target_of(current.base(self.index, x), dense)
                lost = target.flatten(0, -2) - current.added(self.index, written)
                lost = current.before_sum(lost) if branch_norm is None else branch_norm.taken_back(lost, written)
            # 3. The constant column of a bias; the weights of tokens before a norm inside the branch.
            rows = with_constant_column(inner) if has_bias else inner
            if branch_norm is not None:
                scales = branch_norm.scales(written, current.added(self.index, written))
                rows, inner = rows * scales.to(rows), inner * scales.to(inner)
            accumulator.update_(rows, lost)
            if sketch is not None:
                sketch.update_(inner)
            if moments is not None:
                moments.update_(inner)
            if values is not None:
                values.update_(current.values(self.index, x))
        # 4. Without the dense stream the errors are of what the sublayer added before any reduction.
        if not self.follows_dense:
            judged, _ = states.read_judged()
            if judged is not None:
                target = reference.sum(self.index, judged) - reference.base(self.index, judged)
        # 5. The sums of all workers.
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
        if statistics is None or self.smaller_values is not None:
            return self.shared(partial(self.solve_alone, tensors, statistics))
        # one worker chooses and corrects, and all of them sum the error
        weight, branch_norm = seen_writer(self.sublayer, tensors, self.machine.device)
        units, factors = self.shared(partial(self._solve_seen, tensors, statistics, weight, branch_norm, judged=False))
        factors = with_error(factors, weight.double(), statistics, workers=self.machine.workers)
        return units, unseen(factors, branch_norm), None

    def solve_alone(
        self, tensors: Tensors, statistics: Statistics | None
    ) -> tuple[torch.Tensor, Factors, torch.Tensor | None]:
        """Return what `solve` does, in this process alone."""
        # 1. The writer with its bias, as the norm after it lets the stream see it.
        weight, branch_norm = seen_writer(self.sublayer, tensors, self.machine.device)
        # 2. What stays, and least squares over its columns.
        units, factors = self._solve_seen(tensors, statistics, weight, branch_norm)
        factors = unseen(factors, branch_norm)
        # 3. Values in fewer coordinates.
        if self.smaller_values is None:
            return units, factors, None
        assert statistics is not None
        columns = self.columns_of(units)
        return units, *self._reduce_values(weight, units, columns, factors, statistics, self.smaller_values)

    def _solve_seen(
        self,
        tensors: Tensors,
        statistics: Statistics | None,
        weight: torch.Tensor,
        branch_norm: BranchNorm | None,
        *,
        judged: bool = True,
    ) -> tuple[torch.Tensor, Factors]:
        """Return the units that stay and the corrected writer, both of them as the norm after it lets the stream see.

        `weight`: the writer so. `judged`: whether the error is predicted.
        """
        units = torch.arange(self.dense_units, device=self.machine.device)
        if self.is_reduced and self.shared_heads is not None:
            units = self.shared_heads
        elif self.is_reduced:
            units = self.choose(self._evidence(tensors, weight, statistics, branch_norm))
        return units, self.correct(weight, self.columns_of(units), statistics, judged=judged)

    def correct(
        self, weight: torch.Tensor, columns: torch.Tensor, statistics: Statistics | None, *, judged: bool = True
    ) -> Factors:
        """Correct the writer over the kept columns; its bias is a last column that stays. `judged` as there."""
        has_bias = weight.shape[1] > self.num_columns
        if has_bias:
            columns = torch.cat((columns, columns.new_tensor([weight.shape[1] - 1])))
        correction = self.method.correction
        if correction == "two-stream" and not self.follows_dense:
            correction = "same-layer"
        if correction == "bias" and not has_bias:
            correction = "none"
        share = self.residual_weight(weight.shape[1], 0 if statistics is None else statistics.num_targets)
        damping, shrinkage = self.method.fixed_damping, 0.0
        if statistics is not None and statistics.held_out is None:
            damping = self.damping(weight.shape[1], statistics.num_rows)
        elif statistics is not None and self.method.holds_out:
            damping = best_damping(weight, columns, statistics, correction=correction, residual_weight=share)
        elif statistics is not None:
            shrinkage = best_shrinkage(weight, columns, statistics, damping=damping)
        return correct(
            weight,
            columns,
            statistics,
            correction=correction,
            damping=damping,
            residual_weight=share,
            shrinkage=shrinkage,
            judged=judged,
        )

    def fold(self, tensors: Tensors, factors: Factors) -> Tensors:
        return fold_sublayer(tensors, self.sublayer, self.shape, factors)

    def _evidence(
        self, tensors: Tensors, weight: torch.Tensor, statistics: Statistics | None, branch_norm: BranchNorm | None
    ) -> Evidence:
        """Return what the selector chooses by; `weight`: as the norm lets the stream see it."""
        gram, curvature = None, self.neuron_curvature
        if statistics is not None:
            shrinkage = self.shrinkage(weight.shape[1], statistics.num_rows)
            gram = towards_diagonal(statistics.gram[: self.num_columns, : self.num_columns], shrinkage)
        if curvature is not None and branch_norm is not None:
            curvature = branch_norm.curvature_of_seen(curvature)
        return Evidence(
            consumer=weight[:, : self.num_columns],
            producer_energy=self.producer_energy(tensors).to(self.machine.device) if self.needs("producers") else None,
            gram=gram,
            generator=torch.Generator().manual_seed(self.seed + self.layer),
            moments=None if statistics is None else statistics.moments,
            sketch=None if statistics is None else statistics.sketch,
            pivoting=self.method.pivoting,
            group_size=self.method.pivot_group_size,
            curvature=curvature,
        )

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

    def _accumulator(self, weight: torch.Tensor, states: States) -> GramAccumulator | SplitAccumulator:
        """Return the sums of what a writer `weight (d, n)` reads."""
        device, (output_size, size) = self.machine.device, weight.shape
        target_size = output_size if self.follows_dense else None
        if self.holds_out(size, states.stack_tokens):
            return SplitAccumulator(size, output_size=target_size, device=device, row_offset=states.first_row)
        return GramAccumulator(size, output_size=target_size, device=device)

    def _sketch(self, states: States) -> SketchAccumulator | None:
        if not self.takes_sketch or self.method.sketch == "none":
            return None
        return SketchAccumulator(
            self.method.rows_of_sketch(self.num_columns),
            self.num_columns,
            nonzeros=NONZEROS[self.method.sketch],
            seed=self.seed,
            device=self.machine.device,
            row_offset=states.first_row,
        )

    def _reachable(self, statistics: Statistics) -> Statistics:
        """Return the residual within the subspace that the sublayer writes to; its energy also counts the rest."""
        if self.subspaces is None or self.stack.norms_after or statistics.residual is None:
            return statistics
        inside = self.subspaces.inside(statistics.residual, self.position + 1)
        held_out = None if statistics.held_out is None else self._reachable(statistics.held_out)
        return replace(statistics, residual=inside, held_out=held_out)

    def _warn_if_dead(self, gram: torch.Tensor) -> None:
        """Warn if more columns are zero on the whole text than are removed, because the rest is an arbitrary choice."""
        diagonal = gram.diagonal()[: self.num_columns]
        kept_columns = self.kept_units * self.num_columns // self.dense_units
        dead, removed = int((diagonal == 0).sum()), self.num_columns - kept_columns
        if dead > removed:
            logger.warning(
                "Layer %d, %s: %d of %d columns are zero on the whole calibration text, more than the %d removed.",
                *(self.number, self.sublayer.kind, dead, self.num_columns, removed),
            )
