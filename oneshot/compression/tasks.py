"""The tasks of sublayers with one writer: attention loses heads or sizes inside them, an FFN loses neurons."""

from dataclasses import replace

import torch

from oneshot.architecture import Attention, FeedForward
from oneshot.compression.fold import head_columns, row_energy
from oneshot.compression.inner_heads import InnerMaps, keep_heads, query_key_subspaces, with_smaller_scores
from oneshot.compression.one_writer import OneWriterTask
from oneshot.compression.statistics import HeadGramAccumulator, shrinkage_of
from oneshot.compression.sublayer import LayerWork, Reduction, shrinks, takes_sketch
from oneshot.compression.up_proj import up_passes
from oneshot.method import SelectorName
from oneshot.selection import SELECTORS, Evidence, select_heads
from oneshot.stream import Layer, States
from oneshot.tensors import Tensors


class AttentionTask(OneWriterTask):
    """Attention loses heads, or sizes inside them."""

    mixer: Attention

    @property
    def dense_units(self) -> int:
        return self.shape.num_attention_heads

    @property
    def kept_units(self) -> int:
        return self.kept.num_attention_heads

    @property
    def num_columns(self) -> int:
        return self.dense_units * self.shape.head_dim

    @property
    def selector(self) -> SelectorName:
        return self.method.heads

    @property
    def smaller_scores(self) -> int | None:
        return self.kept.query_key_size

    @property
    def smaller_values(self) -> int | None:
        return self.kept.value_size

    @property
    def follows_dense(self) -> bool:
        """Return whether the target comes from the dense stream.

        By default attention follows it only for a smaller hidden size: fewer heads that follow it diverge
        (benchmarks/records/experiments.md).
        """
        return super().follows_dense and (self.corrects_slices or self.method.heads_correction == "two-stream")

    def columns_of(self, units: torch.Tensor) -> torch.Tensor:
        return head_columns(units, self.shape.head_dim)

    def choose(self, evidence: Evidence) -> torch.Tensor:
        return select_heads(
            self.selector,
            evidence,
            num_groups=self.shape.num_key_value_heads,
            heads_per_group=self.shape.heads_per_group,
            kept_groups=self.kept.num_key_value_heads,
            kept_heads_per_group=self.kept.num_attention_heads // self.kept.num_key_value_heads,
        )

    def producer_energy(self, tensors: Tensors) -> torch.Tensor:
        group_of_head = torch.arange(self.dense_units) // self.shape.heads_per_group
        values = row_energy(tensors, self.mixer.v).view(-1, self.shape.head_dim)
        return values[group_of_head].flatten()

    @property
    def reductions(self) -> list[Reduction]:
        scores: list[Reduction] = [] if self.smaller_scores is None else [self.shrink_scores_]
        return scores + super().reductions

    def all_passes(self, states: States) -> float:
        return (self.smaller_scores is not None) + super().all_passes(states)

    def shrink_scores_(self, work: LayerWork, states: States, current: Layer) -> None:
        """Give queries and keys fewer coordinates, by their Grams on the text."""
        shape, device, workers = self.shape, self.machine.device, self.machine.workers
        queries = HeadGramAccumulator(shape.num_attention_heads, shape.head_dim, device=device)
        keys = HeadGramAccumulator(shape.num_key_value_heads, shape.head_dim, device=device)
        for x, _ in states.read():
            query, key = current.queries_keys(self.index, x)
            queries.update_(query)
            keys.update_(key)
        grams, size = (queries.finish(workers), keys.finish(workers)), self.smaller_scores
        assert size is not None
        maps = self.shared(lambda: query_key_subspaces(*grams, size=size, rotary=self.stack.rotary))
        smaller = with_smaller_scores(work.working, self.mixer, shape.heads_per_group, maps)
        work.working, work.maps[self.index] = smaller

    def keep_(self, work: LayerWork, units: torch.Tensor, values: torch.Tensor | None) -> None:
        kept = keep_heads(work.maps.get(self.index, InnerMaps()), units, self.shape.heads_per_group)
        kept = kept if values is None else replace(kept, values=values)
        fixed = self.mixer.fixed_heads and self.is_reduced
        work.maps[self.index] = replace(kept, heads=units) if fixed else kept


class FeedForwardTask(OneWriterTask):
    """A feed-forward network loses neurons; one beside the experts of other layers stays as it is."""

    mixer: FeedForward

    @property
    def dense_units(self) -> int:
        return self.shape.layer(self.layer).intermediate_size

    @property
    def kept_units(self) -> int:
        if self.shape.experts is not None:
            return self.dense_units
        return self.plan.shape_of_layer(self.shape, self.layer).layer(self.layer).intermediate_size

    @property
    def selector(self) -> SelectorName:
        return self.method.ffn

    @property
    def takes_sketch(self) -> bool:
        return self.is_reduced and takes_sketch(self.method)

    @property
    def corrects_up(self) -> bool:
        """Return whether `up_proj` is also corrected; `Method` and `Grid.settle` refuse it where it cannot be."""
        return self.method.up_steps > 0 and (self.is_reduced or bool(self.ranks))

    @property
    def is_solved(self) -> bool:
        return super().is_solved or self.corrects_up

    @property
    def neuron_curvature(self) -> torch.Tensor | None:
        return None if self.curvature is None else self.curvature.ffn

    def damping(self, num_columns: int, num_rows: int) -> float:
        """Return the damping; with few tokens held-out ones say how much is corrected, and the ridge does not grow."""
        few = self.shrinkage(num_columns, num_rows) > 0
        return self.method.fixed_damping if few else super().damping(num_columns, num_rows)

    def shrinkage(self, num_columns: int, num_rows: int) -> float:
        few = self.is_reduced and not self.corrects_slices and shrinks(self.method)
        return shrinkage_of(num_columns, num_rows) if few else 0.0

    def holds_out(self, num_columns: int, num_rows: int) -> bool:
        return self.method.holds_out or self.shrinkage(num_columns, num_rows) > 0

    def choose(self, evidence: Evidence) -> torch.Tensor:
        return SELECTORS[self.selector].neurons(evidence, self.kept_units)

    def producer_energy(self, tensors: Tensors) -> torch.Tensor:
        return row_energy(tensors, *self.mixer.readers)

    def keep_(self, work: LayerWork, units: torch.Tensor, values: torch.Tensor | None) -> None:
        if self.index in work.ranks:
            work.ranks[self.index] = {kind: one.rows(units) for kind, one in work.ranks[self.index].items()}

    def all_passes(self, states: States) -> float:
        return super().all_passes(states) + (up_passes(self, states) if self.corrects_up else 0)
