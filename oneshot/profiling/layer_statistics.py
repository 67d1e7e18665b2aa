"""One layer's statistics over the dense stream: what all its error curves are computed from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from oneshot.architecture import RankedKind
from oneshot.checkpoint import Model
from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.curvature import LayerCurvature
from oneshot.compression.expert_scores import ExpertSums
from oneshot.compression.expert_statistics import ExpertStatistics
from oneshot.compression.fold import augmented_weight
from oneshot.compression.ranks import RankAccumulator, Ranked
from oneshot.compression.statistics import (
    GramAccumulator,
    HeadGramAccumulator,
    MomentAccumulator,
    Statistics,
    with_constant_column,
)
from oneshot.machine import Machine, Workers
from oneshot.profiling.expert_profile import MixtureSums, experts_task
from oneshot.stream import Layer
from oneshot.tensors import Tensors


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of a dense layer, summed over all workers.

    Attributes:
        heads: statistics of the inputs of attention's output linear; None without attention, or if no probed kind needs
            them.
        neurons: statistics of the inputs of the FFN's output linear, with moments, or of a group of a mixture's experts
            if they may be narrower. None for one FFN where other layers have experts: it stays.
        effects: of whole experts, if there may be fewer; else None.
        query_key_grams: Grams of queries and of keys by head; empty if they are not probed or cannot shrink.
        linears: those that may have low rank, by the index of their sublayer; empty if ranks are not profiled.
        influence: one minus the mean cosine of the layer's input and output (ShortGPT equation 1).
    """

    heads: Statistics | None
    neurons: Statistics | ExpertStatistics | None
    effects: ExpertSums | None
    query_key_grams: list[torch.Tensor]
    linears: dict[int, dict[RankedKind, Ranked]]
    influence: float


class LayerSums:
    """A step of the dense stream through a layer that sums the layer's statistics on the way.

    Args:
        number: the layer's number. tensors, layer: the dense layer. probed: the measured kinds of `PROBED_KINDS`.
        with_ranks: whether ranks of linears are. has_curvature: as in `RankAccumulator`. group: the experts whose
            neurons are; None for all.
    """

    def __init__(
        self,
        model: Model,
        machine: Machine,
        number: int,
        tensors: Tensors,
        layer: Layer,
        *,
        probed: Sequence[str],
        with_ranks: bool,
        has_curvature: bool,
        group: range | None = None,
    ) -> None:
        shape, device, stack = model.shape.of(number), machine.device, model.family.stack_of(number)
        self._shape, self._machine, self._tensors, self._layer = shape, machine, tensors, layer
        self._mixer, self._ffn = stack.mixer_index, stack.index_of("ffn")
        self._attends = bool(stack.attentions)
        reads_heads = self._attends and not {"heads", "inner"}.isdisjoint(probed)
        self._heads = self._accumulator(stack.sublayers[self._mixer].writer) if reads_heads else None
        self._queries_keys: list[HeadGramAccumulator] = []
        if self._attends and "inner" in probed and model.family.reason_against("queries and keys") is None:
            counts = shape.num_attention_heads, shape.num_key_value_heads
            self._queries_keys = [HeadGramAccumulator(count, shape.head_dim, device=device) for count in counts]
        self._ranks: dict[int, RankAccumulator] = {}
        stays = number in model.family.dense_layers
        if with_ranks and not stays:
            self._ranks = {
                index: RankAccumulator(
                    shape, stack.sublayers[index], index, tensors, device, has_curvature=has_curvature
                )
                for index in (self._mixer, self._ffn)
                if stack.sublayers[index].mixer.ranked
            }
        self._waits = stack.waits(self._mixer)
        self._branch_norms = [BranchNorm.of(each, tensors, device) for each in stack.sublayers]
        self._experts: MixtureSums | None = None
        self._neurons: tuple[GramAccumulator, MomentAccumulator] | None = None
        if stack.experts is not None:
            task = experts_task(model, machine, number, shape.intermediate_size // 2)
            self._experts = MixtureSums(task, tensors, probed, group)
        elif not stays:
            moments = MomentAccumulator(shape.layer(number).intermediate_size, device=device)
            self._neurons = self._accumulator(stack.sublayers[self._ffn].writer), moments
        self._cosines, self._rows = torch.zeros((), dtype=torch.float64, device=device), 0

    def __call__(self, x: torch.Tensor, _: bool) -> torch.Tensor:
        """Return a batch `(sequences, length, D)` behind the layer."""
        layer, ffn = self._layer, self._ffn
        total = self._with_attention(x) if self._attends else layer.sum(self._mixer, x)
        attended = layer.moved(self._mixer, x, total)
        written, base = self._written(attended), total if self._waits else attended
        moved = layer.leave(ffn, base + layer.added(ffn, written.view_as(x)))
        self._cosines.add_(functional.cosine_similarity(x.float(), moved.float(), dim=-1).sum())
        self._rows += x[..., 0].numel()
        return moved

    def _written(self, attended: torch.Tensor) -> torch.Tensor:
        """Return what the FFN or the experts write for a batch; their statistics are summed on the way."""
        layer, ffn = self._layer, self._ffn
        if self._experts is not None:
            return self._experts.update_(layer, attended)
        neurons = layer.inner(ffn, attended)
        if ffn in self._ranks:
            self._ranks[ffn].update_(layer, attended, neurons)
        written = layer.write(ffn, neurons)
        if self._neurons is not None:
            grams, moments = self._neurons
            rows = with_constant_column(neurons) if self._shape.mlp_bias else neurons
            grams.update_(self._weighed(ffn, rows, neurons))
            moments.update_(self._weighed(ffn, neurons, neurons))
        return written

    def _with_attention(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of a batch and what attention adds to it; attention's statistics are summed on the way."""
        layer, attention = self._layer, self._mixer
        heads = layer.inner(attention, x)
        if self._heads is not None:
            rows = with_constant_column(heads) if self._shape.output_bias else heads
            self._heads.update_(self._weighed(attention, rows, heads))
        if self._queries_keys:
            for grams, projected in zip(self._queries_keys, layer.queries_keys(attention, x), strict=True):
                grams.update_(projected)
        if attention in self._ranks:
            self._ranks[attention].update_(layer, x, heads)
        return x + layer.added(attention, layer.write(attention, heads).view_as(x))

    def _weighed(self, index: int, rows: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Return rows weighed as a norm after the writer does, which reads `inner`; as they are without such a norm."""
        norm = self._branch_norms[index]
        return rows if norm is None else rows * norm.scales_of(self._layer, index, inner).to(rows)

    def finish(self, curvature: LayerCurvature | None = None) -> LayerStatistics:
        """Return the statistics with the sums of all workers; `curvature`: of the layer."""
        workers = self._machine.workers
        totals = torch.stack((self._cosines, torch.full_like(self._cosines, self._rows)))
        workers.sum_(totals)
        return LayerStatistics(
            neurons=self._of_neurons(workers),
            effects=None if self._experts is None else self._experts.effects(workers),
            query_key_grams=[grams.finish(workers) for grams in self._queries_keys],
            linears={index: sums.finish(workers, curvature) for index, sums in self._ranks.items()},
            heads=None if self._heads is None else self._heads.finish(workers=workers),
            influence=1 - float(totals[0] / totals[1]),
        )

    def _of_neurons(self, workers: Workers) -> Statistics | ExpertStatistics | None:
        if self._experts is not None:
            return self._experts.statistics(workers)
        if self._neurons is None:
            return None
        grams, moments = self._neurons
        return replace(grams.finish(workers=workers), moments=moments.finish(workers))

    def _accumulator(self, writer: str) -> GramAccumulator:
        size = augmented_weight(self._tensors, writer).shape[1]
        return GramAccumulator(size, output_size=None, device=self._machine.device)
