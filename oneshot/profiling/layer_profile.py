"""What smaller sizes of one layer cost: the error curves of its sublayers, and the probes of reduced ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from oneshot.architecture import RANKED_KINDS, ModelShape, RankedKind
from oneshot.checkpoint import Model
from oneshot.compression.branch_norm import seen_writer, unseen
from oneshot.compression.correction import Factors, correct
from oneshot.compression.curvature import root_of
from oneshot.compression.expert_removal import keep_experts
from oneshot.compression.expert_scores import ExpertSums
from oneshot.compression.fold import fold_sublayer, head_columns
from oneshot.compression.inner_heads import (
    query_key_errors,
    query_key_subspaces,
    value_errors,
    value_subspaces,
    with_smaller_scores,
)
from oneshot.compression.ranks import Ranked, with_ranks
from oneshot.compression.statistics import Statistics
from oneshot.linalg.interpolative import nested_errors, ordered_factor, trailing_norms
from oneshot.linalg.pivoted_qr import weighted_pivots
from oneshot.machine import Machine
from oneshot.planning.plan import RemovedUnit
from oneshot.profiling.expert_counts import count_curve, expert_order, probed_count
from oneshot.profiling.expert_profile import NarrowerExperts, experts_task
from oneshot.profiling.layer_curves import head_tail, squared_error, unmeasured
from oneshot.profiling.probes import MIN_PROBE_ERROR, Probe, Probes, SublayerOutput, probe_size
from oneshot.selection import Evidence, select_heads
from oneshot.selection.pivots import group_order
from oneshot.selection.scores import flap
from oneshot.stream import Layer, LayerBuilder
from oneshot.tensors import Tensors

RANK_SHARE = 1 / 2  # of a linear's full rank stays where its error is measured


@dataclass(frozen=True)
class Measures:
    """State what a profile measures.

    Attributes:
        head_unit: the heads that are removed together. damping: ridge of the probes' corrections. probed: the kinds of
            `PROBED_KINDS` whose sensitivity is measured. ranks: whether ranks of linears are profiled. followed: the
            layers whose reduced FFN passes the rest of the model.
    """

    head_unit: RemovedUnit
    damping: float
    probed: Sequence[str]
    ranks: bool
    followed: Sequence[int]

    def head_units(self, shape: ModelShape) -> int:
        """Return the removable units of a layer: KV groups or heads of a group."""
        return shape.num_key_value_heads if self.head_unit == "kv-group" else shape.heads_per_group


class LayerProfile:
    """Measure one layer into `curves`, and add probes of it in which one sublayer is reduced.

    Args:
        layer: its number. tensors, dense: the layer as it is.

    Attributes:
        curves: zeros where nothing was measured. cost: what a reduced FFN's relative squared error of one costs by its
            own output, see `Probe.energy`.
    """

    def __init__(
        self,
        model: Model,
        machine: Machine,
        builder: LayerBuilder,
        probes: Probes,
        measures: Measures,
        layer: int,
        tensors: Tensors,
        dense: Layer,
    ) -> None:
        self._model, self._machine = model, machine
        self._shape, self._stack, self._device = model.shape.of(layer), model.family.stack_of(layer), machine.device
        self._builder, self._probes, self._measures = builder, probes, measures
        self._layer, self._tensors, self._dense = layer, tensors, dense
        units = max(map(measures.head_units, model.shape.distinct))
        self.curves, self.cost = unmeasured(model.shape, units), 0.0

    def heads(self, statistics: Statistics) -> None:
        """Measure what fewer heads cost; `statistics`: of what the output linear of attention reads."""
        # 1. The writer as the stream sees it, and the choice of every number of heads.
        shape, units = self._shape, self._measures.head_units(self._shape)
        by_group = self._measures.head_unit == "kv-group"
        sublayer = self._stack.sublayers[self._stack.mixer_index]
        weight, branch_norm = seen_writer(sublayer, self._tensors, self._device)
        width = shape.num_attention_heads * shape.head_dim
        evidence = Evidence(weight[:, :width], None, statistics.gram[:width, :width], torch.Generator())
        errors, tails = self.curves["head_errors"][: units + 1], self.curves["head_tails"][: units + 1]

        def select(kept_units: int) -> torch.Tensor:
            heads = select_heads(
                "id",
                evidence,
                num_groups=shape.num_key_value_heads,
                heads_per_group=shape.heads_per_group,
                kept_groups=kept_units if by_group else shape.num_key_value_heads,
                kept_heads_per_group=shape.heads_per_group if by_group else kept_units,
            )
            return head_columns(heads, shape.head_dim)

        # 2. The curves.
        energies = evidence.known_gram().diagonal().double() * evidence.output_energies()
        errors[0], tails[0] = 1.0, float(energies.cpu().sum().sqrt())  # of all weighted columns
        choices = [select(kept_units) for kept_units in range(1, units)]
        for kept_units, columns in enumerate(choices, start=1):
            tails[kept_units] = head_tail(evidence, columns)
        if by_group and units > 1:
            errors[1:] = self._errors_of_groups(evidence, weight, statistics)[1:]
        else:
            for kept_units, columns in enumerate(choices, start=1):
                errors[kept_units] = squared_error(self._correct(weight, columns, statistics, shape.output_bias))
        if units == 1:
            return
        # 3. The probe.
        probed = probe_size(errors)
        factors = self._correct(weight, choices[probed - 1], statistics, shape.output_bias, judged=False)
        folded = fold_sublayer(self._tensors, sublayer, shape, unseen(factors, branch_norm))
        self._add("heads", folded, float(errors[probed]))

    def values(self, statistics: Statistics) -> None:
        """Measure what fewer coordinates of values cost; `statistics` as in `heads`."""
        shape, name = self._shape, f"{self._stack.attention.out}.weight"
        width = shape.num_attention_heads * shape.head_dim
        weight, gram = self._tensors[name].to(self._device), statistics.gram[:width, :width]
        groups, full = shape.num_key_value_heads, shape.head_dim
        errors = self.curves["value_errors"]
        errors.copy_(value_errors(weight, gram, num_groups=groups, head_dim=full))
        size = probe_size(errors)
        _, restricted = value_subspaces(
            weight, gram, num_groups=groups, head_dim=full, size=size, correct=True, damping=self._measures.damping
        )
        self._add("values", self._tensors | {name: restricted.to(weight)}, float(errors[size]))

    def scores(self, query_grams: torch.Tensor, key_grams: torch.Tensor) -> None:
        """Measure what fewer coordinates of queries and keys cost, from their Grams by head."""
        rotary, attention = self._stack.rotary, self._stack.attention
        errors = self.curves["query_key_errors"]
        errors.copy_(query_key_errors(query_grams, key_grams, rotary=rotary))
        size = probe_size(errors[:: 1 + rotary]) * (1 + rotary)  # rotary pairs stay whole
        maps = query_key_subspaces(query_grams, key_grams, size=size, rotary=rotary)
        reduced, _ = with_smaller_scores(self._tensors, attention, self._shape.heads_per_group, maps)
        self._add("queries and keys", reduced, float(errors[size]))

    def ranks(
        self, index: int, linears: dict[RankedKind, Ranked], dense: SublayerOutput, metric: torch.Tensor | None
    ) -> None:
        """Measure what one rank of each linear changes in the `dense` output of sublayer `index`.

        `metric`: the curvature of this output, or None.
        """
        mixer = self._stack.sublayers[index].mixer
        curves = {kind: linear.errors() for kind, linear in linears.items()}
        ranks = {kind: probe_size(errors, RANK_SHARE) for kind, errors in curves.items()}
        changes = []
        for kind, linear in linears.items():
            nearest = with_ranks(self._tensors, mixer, {kind: linear.nearest(ranks[kind])})
            reduced = self._with(nearest)
            changes.append(dense.compare(reduced, metric)[0])
        for (kind, errors), energy in zip(curves.items(), torch.stack(changes).tolist(), strict=True):
            scaled = errors * (energy / float(errors[ranks[kind]].clamp_min(torch.finfo(errors.dtype).tiny)))
            self.curves["rank_errors"][RANKED_KINDS.index(kind), : len(errors)] = scaled

    def ffn(self, statistics: Statistics, dense: SublayerOutput, metric: torch.Tensor | None) -> None:
        """Measure what fewer neurons cost; `dense`: of the FFN. `metric` as in `ranks`."""
        shape, curves, index = self._shape, self.curves, self._stack.index_of("ffn")
        sublayer = self._stack.sublayers[index]
        weight, branch_norm = seen_writer(sublayer, self._tensors, self._device)
        of_seen = metric
        if metric is not None and branch_norm is not None:
            of_seen = branch_norm.curvature_of_seen(metric)
        # 1. The order of the neurons, the first to keep first.
        width, share = shape.layer(self._layer).intermediate_size, shape.width_share(self._layer)
        down, gram = weight[:, :width], statistics.gram[:width, :width]
        evidence = Evidence(down, None, gram, torch.Generator(), moments=statistics.moments, curvature=of_seen)
        order = weighted_pivots(*evidence.neurons(), rank=len(gram))
        # 2. The curves, from one factorisation in this order.
        factor = ordered_factor(gram, order)
        root = None if of_seen is None else root_of(of_seen)
        seen = weight if root is None else root.float() @ weight.float()
        errors = nested_errors(factor, seen[:, order])
        fill(curves["ffn_errors"], by_units(errors, share))
        fill(curves["ffn_tails"], by_units(trailing_norms(factor, evidence.column_weights()[order]), share))
        del factor  # as large as the Gram in float64
        fill(curves["ffn_fluctuation"], flap(evidence).cpu().repeat_interleave(share))
        if "ffn" not in self._measures.probed:
            return
        # 3. The probe.
        step = max(1, shape.width_step // share)
        columns = order[: probe_size(errors[::step]) * step].sort().values
        factors = self._correct(weight, columns, statistics, shape.mlp_bias, judged=False)
        folded = fold_sublayer(self._tensors, sublayer, shape, unseen(factors, branch_norm))
        self._add_ffn(folded, float(errors[len(columns)]), dense, metric)

    def experts(self, measured: NarrowerExperts, dense: SublayerOutput, metric: torch.Tensor | None) -> None:
        """Keep what fewer neurons in every expert cost; `dense`: of the experts. `metric` as in `ranks`."""
        self.curves["ffn_errors"] = measured.errors
        self.curves["expert_tokens"] = measured.tokens
        self._add_ffn(*measured.narrowed(), dense, metric)

    def whole_experts(self, sums: ExpertSums, attended: torch.Tensor) -> None:
        """Measure what fewer experts cost, from their effects; `attended`: the stream before them."""
        experts, index = self._shape.experts, self._stack.index_of("ffn")
        assert experts is not None
        self.curves["expert_errors"], most = count_curve(sums, experts)
        errors = self.curves["expert_errors"]
        self.curves["expert_order"], changes = expert_order(sums)
        self.curves["expert_order_errors"] = changes / most
        self.curves["expert_tokens"] = sums.tokens.cpu()
        kept = probed_count(experts)
        if kept is None:
            return
        task = experts_task(self._model, self._machine, self._layer, self._shape.intermediate_size)
        task = replace(task, plan=task.plan.with_sizes(num_experts=kept))
        reduced = self._with(keep_experts(task, self._tensors, sums)[0])
        total = reduced.sum(index, attended)
        self._probes.add(Probe("experts", self._layer, float(errors[kept])), reduced.leave(index, total))

    def _add_ffn(self, tensors: Tensors, error: float, dense: SublayerOutput, metric: torch.Tensor | None) -> None:
        """Add the probe of the layer whose FFN or experts have these tensors; the rest as in `ffn`."""
        reduced = self._with(tensors)
        energy, index = 0.0, self._stack.index_of("ffn")
        if self._measures.ranks:  # which are priced by it
            cost, total = dense.compare(reduced, metric)
            energy = float(cost)
            self.cost = energy / max(error, MIN_PROBE_ERROR)
        else:
            total = reduced.sum(index, dense.x)
        if self._layer in self._measures.followed:
            self._probes.add(Probe("ffn", self._layer, error, energy), reduced.leave(index, total))

    def _add(self, kind: str, tensors: Tensors, error: float) -> None:
        """Add the probe of the layer with these tensors."""
        reduced = self._with(tensors)
        self._probes.add(Probe(kind, self._layer, error), reduced.run_all(self._probes.dense))

    def _with(self, tensors: Tensors) -> Layer:
        """Return the layer with these tensors, which the probes pass."""
        return self._builder.layer(self._layer, tensors, self._probes.memory)

    def _errors_of_groups(self, evidence: Evidence, weight: torch.Tensor, statistics: Statistics) -> torch.Tensor:
        """Return the least-squares error of every number of kept KV groups, `(groups + 1,)`, from one factorisation.

        Groups are chosen greedily, so fewer of them are the first ones of more. A bias is kept with any number.
        """
        groups = group_order(evidence, self._shape.num_key_value_heads)
        columns = head_columns(groups, evidence.consumer.shape[1] // len(groups))
        bias = torch.arange(evidence.consumer.shape[1], weight.shape[1], device=weight.device)
        order = torch.cat((bias, columns))
        errors = nested_errors(ordered_factor(statistics.gram, order), weight[:, order])
        return errors[len(bias) :: len(columns) // len(groups)]

    def _correct(
        self, weight: torch.Tensor, columns: torch.Tensor, statistics: Statistics, has_bias: bool, judged: bool = True
    ) -> Factors:
        if has_bias:
            columns = torch.cat((columns, columns.new_tensor([weight.shape[1] - 1])))
        damping = self._measures.damping
        return correct(
            weight, columns, statistics, correction="same-layer", damping=damping, reported=False, judged=judged
        )


def fill(row: torch.Tensor, curve: torch.Tensor) -> None:
    """Write a curve into the row of its layer; a layer with fewer neurons than others leaves the end as it is."""
    row[: len(curve)] = curve


def by_units(curve: torch.Tensor, share: int) -> torch.Tensor:
    """Return a curve over kept neurons, `(n + 1,)`, by the widths of wide FFNs, of which this one has a share.

    A width stands for `1 / share` as many neurons, rounded down.
    """
    return curve if share == 1 else curve[torch.arange(share * (len(curve) - 1) + 1) // share]
