"""The FFN block: fewer neurons and the correction of `down_proj`; both streams move to the next layer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from oneshot.arch.base import DOWN_PROJ, GATE_PROJ, UP_PROJ
from oneshot.config import TOKENS_PER_NEURON
from oneshot.factorise import correct
from oneshot.fold import augmented_weight, fold_ffn, row_energy
from oneshot.layerwise.block import Block, relative_error, warn_if_dead
from oneshot.layerwise.streams import Tensors
from oneshot.layerwise.up_proj import up_proj_step, wanted_output
from oneshot.recipes import MOMENT_SELECTORS
from oneshot.records import BlockStatistics, Factors
from oneshot.selection import Evidence, select_neurons
from oneshot.statistics import GramAccumulator, MomentAccumulator, SketchAccumulator, with_constant_column
from oneshot.stream import StreamLayer

NONZEROS = {"count": 1, "sparse-sign": 8}  # per column of the sketching matrix
UP_BATCHES = 2  # of so many batches one corrects `up_proj`


@dataclass(frozen=True)
class FfnBlock(Block):
    """In this order: `run_attention` for the statistics of the neurons, `factorise`, `correct_up`, `run_ffn`."""

    @property
    def reduces_neurons(self) -> bool:
        return self.kept.intermediate_size < self.shape.intermediate_size

    @property
    def is_solved_for(self) -> bool:
        """Whether `down_proj` changes, and statistics of its input are needed where there is text."""
        return self.reduces_neurons or self.corrects_slices

    @property
    def corrects_up(self) -> bool:
        """Whether `up_proj` changes: the FFN's output is linear in it where there is a gate."""
        return self.recipe.up_steps > 0 and self.reduces_neurons and self.shape.gated and self.subspaces is None

    @property
    def up_batches(self) -> int:
        """Every so-many-th batch corrects `up_proj`: all, where fewer had not `TOKENS_PER_NEURON` tokens per neuron."""
        needed = TOKENS_PER_NEURON * self.shape.intermediate_size
        return UP_BATCHES if self.streams.num_tokens >= UP_BATCHES * needed else 1

    @property
    def passes(self) -> float:
        """How often `run_attention`, `correct_up` and `run_ffn` together read the text."""
        if not self.corrects_up:
            return 2
        return 3 + (1 + self.recipe.up_steps) * self.streams.share_read(self.up_batches)

    def run_attention(
        self,
        layer: int,
        tensors: Tensors,
        dense: StreamLayer,
        current: StreamLayer,
        advance: Callable[[float], None],
        *,
        dense_attended: bool,
    ) -> tuple[BlockStatistics | None, torch.Tensor]:
        """Move both streams through attention (the dense one through its FFN, too) and gather the FFN's statistics.

        `dense_attended`: the dense stream has gone through attention already. Also returns the hidden states that the
        last batch ought to have after the FFN, to measure the error against.
        """
        weight = augmented_weight(tensors, DOWN_PROJ)
        accumulator = self.accumulator(weight) if self.is_solved_for else None
        sketch = self._sketch() if self.reduces_neurons and self.recipe.sketch != "none" else None
        moments = None
        if self.recipe.ffn in MOMENT_SELECTORS:
            moments = MomentAccumulator(self.shape.intermediate_size, device=self.device)
        for batch, x, x_dense in self.streams.read():
            h = self.enter(current.attention(x), 2 * layer + 1)
            self.streams.write(batch, h)
            target = None
            if x_dense is not None:
                target = dense.ffn(x_dense if dense_attended else dense.attention(x_dense))
                self.streams.write_dense(batch, target)
            if accumulator is not None:
                neurons = current.neurons(h)
                accumulator.update_(
                    with_constant_column(neurons) if self.shape.mlp_bias else neurons,
                    None if target is None else (target - h).flatten(0, -2),
                )
                if sketch is not None:
                    sketch.update_(neurons)
                if moments is not None:
                    moments.update_(neurons)
            advance(x.shape[0] * x.shape[1])
        _, dense_state = self.streams.read_last()
        wanted = current.ffn(h) if dense_state is None else dense_state
        if accumulator is None:
            return None, wanted
        workers = self.streams.workers
        statistics = replace(
            self.reachable(accumulator.finish(weight, workers), 2 * layer + 2),
            sketch=None if sketch is None else sketch.finish(workers),
            moments=None if moments is None else moments.finish(workers),
        )
        width = self.shape.intermediate_size
        warn_if_dead(layer, "ffn", statistics.gram[:width, :width], kept=self.kept.intermediate_size)
        return statistics, wanted

    def factorise(self, layer: int, tensors: Tensors, statistics: BlockStatistics | None) -> tuple[Tensors, Factors]:
        """The layer with the kept neurons and the corrected `down_proj`; one worker solves, for all."""
        factors = self.shared(2 * layer + 1, lambda: self._solve(tensors, statistics))
        return fold_ffn(tensors, factors), factors

    def _solve(self, tensors: Tensors, statistics: BlockStatistics | None) -> Factors:
        num_neurons = self.shape.intermediate_size
        weight = augmented_weight(tensors, DOWN_PROJ).to(self.device)
        neurons = torch.arange(num_neurons, device=self.device)
        if self.reduces_neurons:
            evidence = Evidence(
                consumer=weight[:, :num_neurons],
                producer_energy=row_energy(tensors, GATE_PROJ, UP_PROJ).to(self.device),
                gram=None if statistics is None else statistics.gram[:num_neurons, :num_neurons],
                generator=self.generator,
                sketch=None if statistics is None else statistics.sketch,
                moments=None if statistics is None else statistics.moments,
                pivoting=self.recipe.pivoting,
                group_size=self.config.pivot_group_size,
            )
            neurons = select_neurons(self.recipe.ffn, self.kept.intermediate_size, evidence)
        return self.correct(weight, neurons, statistics, has_bias=self.shape.mlp_bias)

    def correct_up(
        self, layer: int, tensors: Tensors, folded: Tensors, advance: Callable[[float], None]
    ) -> tuple[Tensors, Factors]:
        """The `folded` layer with a corrected `up_proj`, and `down_proj` solved for again.

        The factors know no error: their statistics are those of what was asked of them, a part of what is wanted.
        `tensors` are those of the dense layer.
        """
        num_neurons, dense = self.shape.intermediate_size, self.streams.layer(tensors)
        share = self.residual_weight(num_neurons, self.streams.num_tokens)
        step = up_proj_step(
            self.streams,
            dense,
            self.streams.layer(folded),
            folded[f"{DOWN_PROJ}.weight"].to(self.device, self.streams.dtype),
            steps=self.recipe.up_steps,
            every=self.up_batches,
            residual_weight=share,
            damping=self.config.fixed_damping,
            advance=advance,
        )
        step = self.shared(2 * layer + 1, lambda: step)  # or rounding would differ between workers
        up = folded[f"{UP_PROJ}.weight"]
        folded = folded | {f"{UP_PROJ}.weight": (up.to(step) + step).to(up)}
        current, weight = self.streams.layer(folded), augmented_weight(folded, DOWN_PROJ).to(self.device)
        accumulator = GramAccumulator(weight.shape[1], output_size=weight.shape[0], device=self.device)
        for _, h, dense_state in self.streams.read():
            neurons = current.neurons(h)
            accumulator.update_(
                with_constant_column(neurons) if self.shape.mlp_bias else neurons,
                wanted_output(dense, h, dense_state, share),
            )
            advance(h.shape[0] * h.shape[1])
        statistics = accumulator.finish(weight, self.streams.workers)
        columns, damping = torch.arange(weight.shape[1], device=self.device), self.config.fixed_damping
        factors = self.shared(
            2 * layer + 1, lambda: correct(weight, columns, statistics, correction="two-stream", damping=damping)
        )
        return fold_ffn(folded, factors), replace(factors, predicted_error=None)

    def run_ffn(
        self, layer: int, current: StreamLayer, wanted: torch.Tensor, advance: Callable[[float], None]
    ) -> float:
        """Move the compressed stream through the FFN; the relative error of its output on the last batch."""
        for batch, h, _ in self.streams.read():
            moved = current.ffn(h)
            self.streams.write(batch, self.enter(moved, 2 * layer + 2))
            advance(h.shape[0] * h.shape[1])
        return relative_error(wanted - h, moved - h)

    def _sketch(self) -> SketchAccumulator:
        width = self.shape.intermediate_size
        return SketchAccumulator(
            self.config.sketch_size or 2 * width,
            width,
            nonzeros=NONZEROS[self.recipe.sketch],
            seed=self.config.seed,
            device=self.device,
            row_offset=self.streams.first_row,
        )
