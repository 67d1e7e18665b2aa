"""The attention block: fewer heads, smaller queries, keys and values, and the correction of `o_proj`.

The streams do not move here: `ffn.py` moves them through the compressed attention.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from oneshot.arch.base import O_PROJ, V_PROJ
from oneshot.factorise import predicted_error, reduce_queries_keys, reduce_values
from oneshot.fold import InnerMaps, augmented_weight, fold_heads, fold_inner, head_columns, keep_heads, row_energy
from oneshot.layerwise.block import Block, block_report, relative_error, warn_if_dead
from oneshot.layerwise.streams import Tensors
from oneshot.recipes import MOMENT_SELECTORS
from oneshot.records import BlockReport, BlockStatistics, Factors
from oneshot.selection import Evidence, select_heads
from oneshot.statistics import HeadGramAccumulator, MomentAccumulator, with_constant_column
from oneshot.stream import StreamLayer


class AttentionBlock(Block):
    """Queries and keys come first, because everything behind them sees the scores; then `compress`."""

    @property
    def reduces_heads(self) -> bool:
        return self.kept.num_attention_heads < self.shape.num_attention_heads

    @property
    def is_solved_for(self) -> bool:
        """Whether `o_proj` changes, and statistics of its input are needed."""
        return self.reduces_heads or self.plan.value_size is not None or self.corrects_slices

    @property
    def follows_dense(self) -> bool:
        """Only where a smaller hidden size is to be made up for: fewer heads, pulled to the dense stream, diverge."""
        return self.corrects_slices

    def reduce_queries_keys(
        self, layer: int, tensors: Tensors, current: StreamLayer, size: int
    ) -> tuple[Tensors, InnerMaps]:
        """A layer whose full queries and keys give the scores of the smaller ones, and the maps to those."""
        shape, workers = self.shape, self.streams.workers
        queries = HeadGramAccumulator(shape.num_attention_heads, shape.head_dim, device=self.device)
        keys = HeadGramAccumulator(shape.num_key_value_heads, shape.head_dim, device=self.device)
        for _, x, _ in self.streams.read():
            query, key = current.queries_keys(x)
            queries.update_(query)
            keys.update_(key)
        grams = queries.finish(workers), keys.finish(workers)
        query_maps, key_maps, pairs = self.shared(
            2 * layer, lambda: reduce_queries_keys(*grams, size=size, rotary=shape.num_positions == 0)
        )
        # Full queries M⁺ M q and keys Mᵀ N k have the scores (N k)ᵀ (M q); M and (M⁺)ᵀ take them to the smaller ones.
        inverses = torch.linalg.pinv(query_maps)
        group_of_head = slice(None, None, shape.heads_per_group)
        full = InnerMaps(queries=inverses @ query_maps, keys=query_maps[group_of_head].mT @ key_maps)
        return fold_inner(tensors, full), InnerMaps(query_maps, inverses[group_of_head].mT, rotary_pairs=pairs)

    def compress(
        self,
        layer: int,
        tensors: Tensors,
        maps: InnerMaps,
        dense: StreamLayer,
        current: StreamLayer,
        advance: Callable[[float], None],
    ) -> tuple[Tensors, InnerMaps, BlockReport]:
        """The layer with fewer heads, values in subspaces and a corrected `o_proj`; the compressed stream stays."""
        shape = self.shape
        weight = augmented_weight(tensors, O_PROJ).to(self.device)
        statistics = self.reachable(self._statistics(weight, dense, current, advance), 2 * layer + 1)
        width, kept = (heads * shape.head_dim for heads in (shape.num_attention_heads, self.kept.num_attention_heads))
        warn_if_dead(layer, "heads", statistics.gram[:width, :width], kept=kept)
        heads, factors, values = self.shared(2 * layer, lambda: self._solve(tensors, weight, statistics))
        maps = keep_heads(maps, heads, shape.heads_per_group)
        if values is not None:
            maps = replace(maps, values=values)
        folded = fold_heads(
            tensors, factors, heads=heads, heads_per_group=shape.heads_per_group, head_dim=shape.head_dim
        )
        measured = self._measure(dense, self.streams.layer(folded))
        report = block_report("heads", shape.num_attention_heads, self.kept.num_attention_heads, factors, measured)
        return folded, maps, report

    def _statistics(
        self, weight: torch.Tensor, dense: StreamLayer, current: StreamLayer, advance: Callable[[float], None]
    ) -> BlockStatistics:
        accumulator = self.accumulator(weight)
        moments = None
        if self.recipe.heads in MOMENT_SELECTORS:
            moments = MomentAccumulator(self.shape.num_attention_heads * self.shape.head_dim, device=self.device)
        for batch, x, x_dense in self.streams.read():
            heads = current.heads(x)
            target = None
            if x_dense is not None and self.follows_dense:
                attended = dense.attention(x_dense)
                self.streams.write_dense(batch, attended)
                target = (attended - x).flatten(0, -2)
            accumulator.update_(with_constant_column(heads) if self.shape.output_bias else heads, target)
            if moments is not None:
                moments.update_(heads)
            advance(x.shape[0] * x.shape[1])
        workers = self.streams.workers
        found = accumulator.finish(weight, workers)
        return found if moments is None else replace(found, moments=moments.finish(workers))

    def _solve(
        self, tensors: Tensors, weight: torch.Tensor, statistics: BlockStatistics
    ) -> tuple[torch.Tensor, Factors, torch.Tensor | None]:
        """The heads to keep, `o_proj` over them, and the values' subspaces where they get smaller."""
        heads = self._select(tensors, weight, statistics)
        columns = head_columns(heads, self.shape.head_dim)
        factors = self.correct(weight, columns, statistics, has_bias=self.shape.output_bias)
        if self.plan.value_size is None:
            return heads, factors, None
        values, restricted = reduce_values(
            factors.weight[:, : len(columns)],
            statistics.gram[columns.unsqueeze(1), columns],
            num_groups=self.kept.num_key_value_heads,
            head_dim=self.shape.head_dim,
            size=self.plan.value_size,
            correct=self.recipe.solves,
            damping=self.config.fixed_damping,
        )
        new_weight = torch.cat((restricted, factors.weight[:, len(columns) :]), dim=1)
        error = predicted_error(weight.double(), new_weight, factors.kept, statistics)
        return heads, replace(factors, weight=new_weight, predicted_error=error), values

    def _select(self, tensors: Tensors, weight: torch.Tensor, statistics: BlockStatistics) -> torch.Tensor:
        """The query heads to keep, ascending."""
        shape = self.shape
        if not self.reduces_heads:
            return torch.arange(shape.num_attention_heads, device=self.device)
        width = shape.num_attention_heads * shape.head_dim
        group_of_head = torch.arange(shape.num_attention_heads) // shape.heads_per_group
        values = row_energy(tensors, V_PROJ).view(-1, shape.head_dim)[group_of_head].flatten()
        evidence = Evidence(
            consumer=weight[:, :width],
            producer_energy=values.to(self.device),
            gram=statistics.gram[:width, :width],
            generator=self.generator,
            moments=statistics.moments,
        )
        return select_heads(
            self.recipe.heads,
            evidence,
            num_groups=shape.num_key_value_heads,
            heads_per_group=shape.heads_per_group,
            kept_groups=self.kept.num_key_value_heads,
            kept_heads_per_group=self.kept.num_attention_heads // self.kept.num_key_value_heads,
        )

    def _measure(self, dense: StreamLayer, compressed: StreamLayer) -> float:
        """Relative error of the block's output on the last batch."""
        x, attended = self.streams.read_last()
        wanted = attended if attended is not None and self.follows_dense else dense.attention(x)
        return relative_error(wanted - x, compressed.attention(x) - x)
