"""One dense pass: error curves of every smaller size, and what reduced sublayers do to the model's output.

A few *probe* sequences, apart from those of the statistics, pass through the model once for every sublayer that is
reduced alone. Each worker has its part of the statistics' sequences. Workers take turns with the sublayers: one
computes a sublayer's curve and moves its probe.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch

from oneshot.checkpoint import Model
from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.correction import Factors, correct, predicted_error
from oneshot.compression.curvature import Curvature, LayerCurvature, seen_by_output
from oneshot.compression.fold import augmented_weight, fold_sublayer, head_columns
from oneshot.compression.inner_heads import (
    query_key_errors,
    query_key_subspaces,
    value_errors,
    value_subspaces,
    with_smaller_scores,
)
from oneshot.compression.ranks import Ranked, with_ranks
from oneshot.compression.statistics import Statistics
from oneshot.families import RANKED_KINDS, RankedKind, Sublayer
from oneshot.linalg.interpolative import nested_errors, ordered_factor, trailing_norms
from oneshot.linalg.pivoted_qr import weighted_pivots
from oneshot.machine import Machine
from oneshot.machine.memory import release_heap
from oneshot.machine.transfer import Uploader
from oneshot.planning import Profile, ProfileOrigin
from oneshot.planning.plan import RemovedUnit
from oneshot.profiling.embedding import EmbeddingProfile
from oneshot.profiling.layer_curves import LayerCurves, head_tail, squared_error, weighted_norm
from oneshot.profiling.layer_statistics import LayerStatistics, LayerSums
from oneshot.profiling.outputs import SublayerOutput
from oneshot.profiling.probes import PROBE_SEQUENCES, PROBED_KINDS, Probe, Probes, probe_size
from oneshot.selection import Evidence, select_heads
from oneshot.selection.pivots import group_order
from oneshot.selection.scores import flap
from oneshot.stream import Layer, States
from oneshot.tensors import Tensors
from oneshot.text import Text

STATISTICS_SEQUENCES = 32  # curves need fewer tokens than corrections
RANK_SHARE = 1 / 2  # of a linear's full rank stays where its error is measured


class LayerProfiler:
    """Profile layers in order: `profile_layer` for each, then `finish`.

    Args:
        head_unit: the heads that are removed together. damping: ridge of the probes' corrections.
        probed: the kinds of `PROBED_KINDS` whose sensitivity is measured; other curves are also left out, except the
            FFN's.
        curvature: output curvature, in whose metric errors of FFNs and of ranks are measured; None for squared errors.
    """

    def __init__(
        self,
        model: Model,
        machine: Machine,
        text: Text,
        *,
        head_unit: RemovedUnit,
        damping: float,
        probed: Sequence[str] = PROBED_KINDS,
        curvature: Curvature | None = None,
        advance: Callable[[float], None] = lambda tokens: None,
    ) -> None:
        self._model, self._machine, self._shape, self._stack = model, machine, model.shape, model.family.stack
        self._head_unit, self._damping, self._probed = head_unit, damping, probed
        self._curvature = curvature
        self._upload = Uploader(machine.device)
        probed_text = text.last(PROBE_SEQUENCES)
        rest = text.part(slice(max(1, text.num_sequences - probed_text.num_sequences)))
        self.text = rest.first(STATISTICS_SEQUENCES * text.longest)
        self.states = States(model, machine, self.text, advance=advance)
        [batch] = probed_text.batches(probed_text.num_sequences)
        self._probes = Probes(self.states.builder.embed(model.read_embedding(), batch))
        self._curves: list[LayerCurves] = []
        self._influence: list[float] = []

    @property
    def head_units(self) -> int:
        """Return the removable units of a layer: KV groups or heads of a group."""
        return self._shape.num_key_value_heads if self._head_unit == "kv-group" else self._shape.heads_per_group

    @property
    def num_probe_tokens(self) -> int:
        """Return the tokens that divergences are means over."""
        return self._probes.num_tokens

    @property
    def _has_ranks(self) -> bool:
        """Return whether ranks of linears are profiled."""
        return "rank" in self._probed and self._model.family.may_have_ranks(self._shape)

    def profile_layer(self, layer: int, tensors: Tensors) -> None:
        """Measure the dense layer's statistics and error curves, and move the probes through it."""
        release_heap()  # of the last layer's factorisations
        tensors = self._upload(tensors)
        dense, workers = self.states.builder.layer(layer, tensors), self._machine.workers
        self._probes.move(dense)
        curvature = None if self._curvature is None else self._curvature.of_layer(layer, self._machine.device)
        statistics = self._statistics(tensors, dense, curvature)
        attention, ffn = (self._stack.index_of(kind) for kind in ("heads", "ffn"))
        before = self._probes.dense
        attended = dense.run(attention, before)
        self._curves.append(LayerCurves.zeros(self._shape, self.head_units))
        self._influence.append(statistics.influence)
        if workers.owns(self._stack.position(layer, attention)):
            if "layer" in self._probed:
                self._probes.add(Probe("layer", layer, before.clone()))
            if "sublayer" in self._probed:
                self._probes.add(Probe("no heads", layer, dense.run(ffn, before)))
            if statistics.heads is not None and "heads" in self._probed:
                self._profile_heads(layer, tensors, statistics.heads)
            if statistics.heads is not None and "inner" in self._probed:
                self._profile_values(layer, tensors, statistics.heads)
            if statistics.query_key_grams:
                self._profile_scores(layer, tensors, *statistics.query_key_grams)
            linears, metric = statistics.linears.pop(attention, {}), None if curvature is None else curvature.output
            self._profile_ranks(layer, tensors, dense, attention, linears, before, metric)
        if workers.owns(self._stack.position(layer, ffn)):
            release_heap()
            if "sublayer" in self._probed:
                self._probes.add(Probe("no ffn", layer, attended.clone()))
            linears, metric = statistics.linears.pop(ffn, {}), None if curvature is None else curvature.ffn
            self._profile_ranks(layer, tensors, dense, ffn, linears, attended, metric)
            self._profile_ffn(layer, tensors, dense, statistics.neurons, attended, metric)
        self._probes.dense = dense.run(ffn, attended)

    def finish(self, origin: ProfileOrigin, embedding: EmbeddingProfile) -> Profile:
        """Return the profile; the probes pass the final norm and the output head."""
        by_kind, of_stream = self._probes.sensitivities(self.states.builder.output(), len(self._curves))
        self.states.close()
        names = [field.name for field in fields(LayerCurves)]
        curves = {name: torch.stack([getattr(layer, name) for layer in self._curves]) for name in names}
        measured = (*curves.values(), of_stream, *by_kind.values())
        together = torch.cat([values.flatten() for values in measured]).to(self._machine.device)
        self._machine.workers.sum_(together)  # zeros from all but the owner
        for values, total in zip(measured, together.cpu().split([one.numel() for one in measured]), strict=True):
            values.copy_(total.view_as(values))
        return Profile(
            **curves,
            ffn_sensitivity=by_kind["ffn"],
            head_sensitivity=by_kind["heads"],
            query_key_sensitivity=by_kind["queries and keys"],
            value_sensitivity=by_kind["values"],
            stream_sensitivity=of_stream,
            layer_divergence=by_kind["layer"],
            head_divergence=by_kind["no heads"],
            ffn_divergence=by_kind["no ffn"],
            block_influence=torch.tensor(self._influence, dtype=torch.float64),
            embedding_gram=embedding.gram,
            embedding_probabilities=embedding.probabilities,
            embedding_errors=embedding.errors,
            embedding_sensitivity=embedding.sensitivity,
            origin=origin,
        )

    def _statistics(self, tensors: Tensors, dense: Layer, curvature: LayerCurvature | None) -> LayerStatistics:
        """Sum the layer's statistics while its text moves through it."""
        sums = LayerSums(self._model, self._machine, tensors, dense, probed=self._probed, with_ranks=self._has_ranks)
        self.states.defer(sums)
        self.states.settle()
        return sums.finish(curvature)

    def _profile_heads(self, layer: int, tensors: Tensors, statistics: Statistics) -> None:
        shape, units, by_group = self._shape, self.head_units, self._head_unit == "kv-group"
        sublayer = self._stack.sublayers[self._stack.index_of("heads")]
        weight, branch_norm = self._seen_weight(tensors, sublayer)
        width = shape.num_attention_heads * shape.head_dim
        evidence = Evidence(weight[:, :width], None, statistics.gram[:width, :width], torch.Generator())
        errors, tails = self._curves[layer].head_errors, self._curves[layer].head_tails

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

        def reduce(columns: torch.Tensor) -> Factors:
            return self._correct(weight, columns, statistics, shape.output_bias)

        errors[0], tails[0] = 1.0, weighted_norm(evidence)
        choices = [select(kept_units) for kept_units in range(1, units)]
        for kept_units, columns in enumerate(choices, start=1):
            tails[kept_units] = head_tail(evidence, columns)
        if by_group and units > 1:
            errors[1:] = self._errors_of_groups(evidence, weight, statistics)[1:]
        else:
            for kept_units, columns in enumerate(choices, start=1):
                errors[kept_units] = squared_error(reduce(columns))
        if units == 1:
            return
        probed = probe_size(errors)
        factors = reduce(choices[probed - 1])
        folded = fold_sublayer(tensors, sublayer, shape, unseen(factors, branch_norm))
        states = self.states.builder.layer(layer, folded).run_all(self._probes.dense)
        self._probes.add(Probe("heads", layer, states, squared_error(factors)))

    def _profile_values(self, layer: int, tensors: Tensors, statistics: Statistics) -> None:
        shape, name = self._shape, f"{self._stack.attention.out}.weight"
        width = shape.num_attention_heads * shape.head_dim
        weight, gram = tensors[name].to(self._machine.device), statistics.gram[:width, :width]
        groups, full = shape.num_key_value_heads, shape.head_dim
        errors = self._curves[layer].value_errors
        errors.copy_(value_errors(weight, gram, num_groups=groups, head_dim=full))
        size = probe_size(errors)
        _, restricted = value_subspaces(
            weight, gram, num_groups=groups, head_dim=full, size=size, correct=True, damping=self._damping
        )
        self._add_inner_probe("values", layer, float(errors[size]), tensors | {name: restricted.to(weight)})

    def _profile_scores(self, layer: int, tensors: Tensors, query_grams: torch.Tensor, key_grams: torch.Tensor) -> None:
        rotary, attention = self._stack.rotary, self._stack.attention
        errors = self._curves[layer].query_key_errors
        errors.copy_(query_key_errors(query_grams, key_grams, rotary=rotary))
        size = probe_size(errors[:: 1 + rotary]) * (1 + rotary)  # rotary pairs stay whole
        maps = query_key_subspaces(query_grams, key_grams, size=size, rotary=rotary)
        reduced, _ = with_smaller_scores(tensors, attention, self._shape.heads_per_group, maps)
        self._add_inner_probe("queries and keys", layer, float(errors[size]), reduced)

    def _profile_ranks(
        self,
        layer: int,
        tensors: Tensors,
        dense: Layer,
        index: int,
        linears: dict[RankedKind, Ranked],
        x: torch.Tensor,
        metric: torch.Tensor | None,
    ) -> None:
        """Measure what one rank of each linear changes in the sublayer's output, from the stream `x` before it.

        `metric`: the curvature of this output, or None.
        """
        if not linears:
            return
        mixer, whole = self._stack.sublayers[index].mixer, self._output(tensors, dense, index, x, metric)
        curves = {kind: linear.errors() for kind, linear in linears.items()}
        ranks = {kind: probe_size(errors, RANK_SHARE) for kind, errors in curves.items()}
        changes = []
        for kind, linear in linears.items():
            reduced = self.states.builder.layer(layer, with_ranks(tensors, mixer, {kind: linear.nearest(ranks[kind])}))
            changes.append(whole.cost_of(reduced))
        for (kind, errors), energy in zip(curves.items(), torch.stack(changes).tolist(), strict=True):
            scaled = errors * (energy / float(errors[ranks[kind]].clamp_min(torch.finfo(errors.dtype).tiny)))
            self._curves[layer].rank_errors[RANKED_KINDS.index(kind), : len(errors)] = scaled

    def _add_inner_probe(self, kind: str, layer: int, error: float, tensors: Tensors) -> None:
        reduced = self.states.builder.layer(layer, tensors)
        self._probes.add(Probe(kind, layer, reduced.run_all(self._probes.dense), error))

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

    def _profile_ffn(
        self,
        layer: int,
        tensors: Tensors,
        dense: Layer,
        statistics: Statistics,
        attended: torch.Tensor,
        metric: torch.Tensor | None,
    ) -> None:
        shape, curves, index = self._shape, self._curves[layer], self._stack.index_of("ffn")
        sublayer = self._stack.sublayers[index]
        weight, branch_norm = self._seen_weight(tensors, sublayer)
        of_seen = metric
        if metric is not None and branch_norm is not None:
            of_seen = branch_norm.curvature_of_seen(metric)
        down = weight[:, : shape.intermediate_size]
        gram = statistics.gram[: shape.intermediate_size, : shape.intermediate_size]
        evidence = Evidence(down, None, gram, torch.Generator(), moments=statistics.moments, curvature=of_seen)
        order = weighted_pivots(*evidence.neurons(), rank=len(gram))
        factor = ordered_factor(gram, order)
        seen = weight if of_seen is None else seen_by_output(weight, of_seen)
        errors = curves.ffn_errors = nested_errors(factor, seen[:, order])
        curves.ffn_tails = trailing_norms(factor, evidence.column_weights()[order])
        del factor  # as large as the Gram in float64
        curves.ffn_fluctuation = flap(evidence).cpu()
        if "ffn" not in self._probed:
            return
        columns = order[: probe_size(errors)].sort().values
        factors = self._correct(weight, columns, statistics, shape.mlp_bias)
        folded = fold_sublayer(tensors, sublayer, shape, unseen(factors, branch_norm))
        reduced = self.states.builder.layer(layer, folded)
        total = reduced.sum(index, attended)
        whole = self._output(tensors, dense, index, attended, metric)
        energy = float(whole.cost_of(reduced)) if self._has_ranks else 0.0
        error = squared_error(factors)
        if of_seen is not None:
            kept = seen_by_output(factors.weight, of_seen)
            error = predicted_error(seen, kept, factors.kept_columns, statistics) ** 2
        self._probes.add(Probe("ffn", layer, reduced.leave(index, total), error, energy))

    def _output(
        self, tensors: Tensors, dense: Layer, index: int, x: torch.Tensor, metric: torch.Tensor | None
    ) -> SublayerOutput:
        branch_norm = BranchNorm.of(self._stack.sublayers[index], tensors, self._machine.device)
        return SublayerOutput(dense, index, x, metric, branch_norm)

    def _seen_weight(self, tensors: Tensors, sublayer: Sublayer) -> tuple[torch.Tensor, BranchNorm | None]:
        """Return a writer with its bias as the stream sees it, and the norm that may follow it."""
        weight = augmented_weight(tensors, sublayer.writer).to(self._machine.device)
        branch_norm = BranchNorm.of(sublayer, tensors, self._machine.device)
        return weight if branch_norm is None else branch_norm.seen(weight), branch_norm

    def _correct(self, weight: torch.Tensor, columns: torch.Tensor, statistics: Statistics, has_bias: bool) -> Factors:
        if has_bias:
            columns = torch.cat((columns, columns.new_tensor([weight.shape[1] - 1])))
        return correct(weight, columns, statistics, correction="same-layer", damping=self._damping)


def unseen(factors: Factors, branch_norm: BranchNorm | None) -> Factors:
    """Return factors of the writer itself from those of what the stream sees of it."""
    return factors if branch_norm is None else replace(factors, weight=branch_norm.unseen(factors.weight))
