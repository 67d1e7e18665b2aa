"""One dense pass: error curves of every smaller size, and what reduced sublayers do to the model's output.

A few *probe* sequences, apart from those of the statistics, pass through the model once for every sublayer that is
reduced alone. All probes move side by side, so every layer is read once. Each worker has its part of the statistics'
sequences. Workers take turns with the sublayers: one computes a sublayer's curve and moves its probe.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from oneshot.checkpoint import Model
from oneshot.compression.correction import Factors, correct
from oneshot.compression.fold import augmented_weight, fold_sublayer, head_columns
from oneshot.compression.inner_heads import (
    query_key_errors,
    query_key_subspaces,
    value_errors,
    value_subspaces,
    with_smaller_scores,
)
from oneshot.compression.ranks import RankAccumulator, Ranked, with_ranks
from oneshot.compression.selection import Evidence, column_scores, group_order, select_heads
from oneshot.compression.statistics import (
    GramAccumulator,
    HeadGramAccumulator,
    MomentAccumulator,
    Statistics,
    with_constant_column,
)
from oneshot.families import RANKED_KINDS, RankedKind, Sublayer
from oneshot.linalg.interpolative import nested_errors, ordered_factor, trailing_norms
from oneshot.linalg.pivoted_qr import weighted_pivots
from oneshot.machine import Machine
from oneshot.machine.memory import release_heap
from oneshot.machine.transfer import Uploader
from oneshot.planning import Profile, ProfileOrigin
from oneshot.planning.plan import RemovedUnit
from oneshot.profiling.embedding import EmbeddingProfile
from oneshot.stream import Layer, States
from oneshot.text import Text

STATISTICS_SEQUENCES = 32  # curves need fewer tokens than corrections
PROBE_SEQUENCES = 2
PROBED_KINDS = ("ffn", "heads", "layer", "sublayer", "inner", "rank")
LEFT_OUT_SUBLAYERS = ("no heads", "no ffn")  # the probes of `sublayer`
INNER_SIZES = ("queries and keys", "values")  # the probes of `inner`
PROBE_SHARE = 3 / 4  # of a sublayer's neurons or heads stays in its probe; less if the error is too small
RANK_SHARE = 1 / 2  # of a linear's full rank stays where its error is measured
MIN_PROBE_ERROR = 1e-4  # relative and squared: below this the divergence is rounding noise

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Probe:
    """Hidden states of the probe sequences in a model with one sublayer reduced, or one layer left out.

    `error` is the relative squared error of the reduced sublayer's own output. `energy`: its mean squared error on the
    probe sequences; only of FFNs.
    """

    kind: str
    layer: int
    error: float
    states: torch.Tensor
    energy: float = 0.0


class LayerProfiler:
    """Profile layers in order: `profile_layer` for each, then `finish`.

    Args:
        head_unit: what a removed head is. damping: ridge of the probes' corrections.
        probed: the kinds of `PROBED_KINDS` whose sensitivity is measured; other curves are also left out, except the
            FFN's.
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
        advance: Callable[[float], None] = lambda tokens: None,
    ) -> None:
        self._model, self._machine, self._shape, self._stack = model, machine, model.shape, model.family.stack
        self._head_unit, self._damping, self._probed = head_unit, damping, probed
        self._upload = Uploader(machine.device)
        probed_text = text.last(PROBE_SEQUENCES)
        rest = text.part(slice(max(1, text.num_sequences - probed_text.num_sequences)))
        self.text = rest.first(STATISTICS_SEQUENCES * text.longest)
        self.states = States(model, machine, self.text, advance=advance)
        [batch] = probed_text.batches(probed_text.num_sequences)
        self._dense = self.states.builder.embed(model.read_embedding(), batch)
        self._ffn_errors: list[torch.Tensor] = []
        self._head_errors: list[torch.Tensor] = []
        self._ffn_tails: list[torch.Tensor] = []
        self._head_tails: list[torch.Tensor] = []
        self._query_key_errors: list[torch.Tensor] = []
        self._value_errors: list[torch.Tensor] = []
        self._rank_errors: list[torch.Tensor] = []
        self._fluctuation: list[torch.Tensor] = []
        self._influence: list[float] = []
        self._probes: list[_Probe] = []

    @property
    def head_units(self) -> int:
        """Return the removable units of a layer: KV groups or heads of a group."""
        return self._shape.num_key_value_heads if self._head_unit == "kv-group" else self._shape.heads_per_group

    @property
    def _has_ranks(self) -> bool:
        """Return whether ranks of linears are profiled."""
        return "rank" in self._probed and self._stack.rotary and self._shape.gated

    @property
    def num_probe_tokens(self) -> int:
        """Return the tokens that divergences are means over."""
        return self._dense.shape[0] * self._dense.shape[1]

    def profile_layer(self, layer: int, tensors: Tensors) -> None:
        """Measure the dense layer's statistics and error curves, and move the probes through it."""
        release_heap()  # of the last layer's factorisations
        tensors = self._upload(tensors)
        dense, workers = self.states.builder.layer(tensors), self._machine.workers
        for probe in self._probes:
            probe.states.copy_(dense.run_all(probe.states))
        heads, neurons, scores, linears = self._statistics(tensors, dense)
        attention, ffn = (self._stack.index_of(kind) for kind in ("heads", "ffn"))
        attended = dense.run(attention, self._dense)
        for curves in (self._head_errors, self._head_tails):
            curves.append(torch.zeros(self.head_units + 1, dtype=torch.float64))
        for curves in (self._ffn_errors, self._ffn_tails):
            curves.append(torch.zeros(self._shape.intermediate_size + 1, dtype=torch.float64))
        for curves in (self._query_key_errors, self._value_errors):
            curves.append(torch.zeros(self._shape.head_dim + 1, dtype=torch.float64))
        self._rank_errors.append(torch.zeros(len(RANKED_KINDS), self._shape.hidden_size + 1, dtype=torch.float64))
        self._fluctuation.append(torch.zeros(self._shape.intermediate_size, dtype=torch.float64))
        if workers.owns(self._stack.position(layer, attention)):
            if "layer" in self._probed:
                self._probes.append(_Probe("layer", layer, 1.0, self._dense.clone()))
            if "sublayer" in self._probed:
                self._probes.append(_Probe("no heads", layer, 1.0, dense.run(ffn, self._dense)))
            if heads is not None and "heads" in self._probed:
                self._profile_heads(layer, tensors, dense, heads)
            if heads is not None and "inner" in self._probed:
                self._profile_values(layer, tensors, heads)
            if scores:
                self._profile_scores(layer, tensors, *scores)
            self._profile_ranks(layer, tensors, dense, attention, linears.pop(attention, {}), self._dense)
        if workers.owns(self._stack.position(layer, ffn)):
            release_heap()
            if "sublayer" in self._probed:
                self._probes.append(_Probe("no ffn", layer, 1.0, attended.clone()))
            self._profile_ranks(layer, tensors, dense, ffn, linears.pop(ffn, {}), attended)
            self._profile_ffn(layer, tensors, dense, neurons, attended)
        self._dense = dense.run(ffn, attended)

    def finish(self, origin: ProfileOrigin, embedding: EmbeddingProfile) -> Profile:
        """Return the profile; the probes pass the final norm and the output head."""
        divergences = self._divergences()
        self.states.close()
        kinds = (*PROBED_KINDS, *LEFT_OUT_SUBLAYERS, *INNER_SIZES)
        by_kind = {kind: torch.zeros(len(self._influence), dtype=torch.float64) for kind in kinds}
        of_stream = torch.zeros(len(self._influence), dtype=torch.float64)
        for probe, divergence in zip(self._probes, divergences, strict=True):
            by_kind[probe.kind][probe.layer] = divergence / max(probe.error, MIN_PROBE_ERROR)
            if probe.energy:
                of_stream[probe.layer] = divergence / probe.energy
        ffn_errors, head_errors = torch.stack(self._ffn_errors), torch.stack(self._head_errors)
        ffn_tails, head_tails = torch.stack(self._ffn_tails), torch.stack(self._head_tails)
        inner_errors = torch.stack(self._query_key_errors), torch.stack(self._value_errors)
        rank_errors, fluctuation = torch.stack(self._rank_errors), torch.stack(self._fluctuation)
        curves = (ffn_errors, head_errors, ffn_tails, head_tails, *inner_errors, rank_errors, fluctuation)
        measured = (*curves, of_stream, *by_kind.values())
        together = torch.cat([values.flatten() for values in measured]).to(self._machine.device)
        self._machine.workers.sum_(together)  # zeros from all but the owner
        for values, total in zip(measured, together.cpu().split([one.numel() for one in measured]), strict=True):
            values.copy_(total.view_as(values))
        return Profile(
            ffn_errors=ffn_errors,
            head_errors=head_errors,
            ffn_tails=ffn_tails,
            head_tails=head_tails,
            query_key_errors=inner_errors[0],
            value_errors=inner_errors[1],
            ffn_sensitivity=by_kind["ffn"],
            head_sensitivity=by_kind["heads"],
            query_key_sensitivity=by_kind["queries and keys"],
            value_sensitivity=by_kind["values"],
            rank_errors=rank_errors,
            stream_sensitivity=of_stream,
            layer_divergence=by_kind["layer"],
            head_divergence=by_kind["no heads"],
            ffn_divergence=by_kind["no ffn"],
            block_influence=torch.tensor(self._influence, dtype=torch.float64),
            ffn_fluctuation=fluctuation,
            embedding_gram=embedding.gram,
            embedding_probabilities=embedding.probabilities,
            embedding_errors=embedding.errors,
            embedding_sensitivity=embedding.sensitivity,
            origin=origin,
        )

    def _divergences(self) -> list[float]:
        """Return the mean divergence of every probe's output from the dense model's, one sequence at a time."""
        output: Any = self.states.builder.output()
        totals = torch.zeros(len(self._probes), dtype=torch.float64, device=self._machine.device)
        for sequence, dense_state in enumerate(self._dense):
            dense = output.prediction(dense_state)
            for index, probe in enumerate(self._probes):
                totals[index] += output.divergence(dense, probe.states[sequence]).double().mean()
        return [max(0.0, total / len(self._dense)) for total in totals.tolist()]

    def _statistics(
        self, tensors: Tensors, dense: Layer
    ) -> tuple[Statistics | None, Statistics, list[torch.Tensor], dict[int, dict[RankedKind, Ranked]]]:
        """Sum statistics of what both writers read and Grams of queries and keys, and move the stream on.

        None for heads that are not profiled; no Grams for queries and keys that are not or that cannot shrink. The last
        ones are linears that may have low rank, by their sublayer; none if ranks are not profiled or not possible.
        """
        shape, machine, stack = self._shape, self._machine, self._stack
        attention, ffn = (stack.index_of(kind) for kind in ("heads", "ffn"))
        probes_heads = not {"heads", "inner"}.isdisjoint(self._probed)
        of_heads = self._accumulator(tensors, stack.sublayers[attention]) if probes_heads else None
        of_scores: list[HeadGramAccumulator] = []
        if "inner" in self._probed and self._model.family.reason_against("queries and keys") is None:
            counts = shape.num_attention_heads, shape.num_key_value_heads
            of_scores = [HeadGramAccumulator(count, shape.head_dim, device=machine.device) for count in counts]
        of_ranks: dict[int, RankAccumulator] = {}
        if self._has_ranks:
            of_ranks = {
                index: RankAccumulator(shape, stack.sublayers[index], index, machine.device)
                for index in (attention, ffn)
            }
        of_neurons = self._accumulator(tensors, stack.sublayers[ffn])
        moments = MomentAccumulator(shape.intermediate_size, device=machine.device)
        cosines, rows = torch.zeros((), dtype=torch.float64, device=machine.device), 0

        def move(x: torch.Tensor, _: bool) -> torch.Tensor:
            nonlocal rows
            heads = dense.inner(attention, x)
            attended = dense.leave(attention, x + dense.write(attention, heads).view_as(x))
            neurons = dense.inner(ffn, attended)
            moved = dense.leave(ffn, attended + dense.write(ffn, neurons).view_as(x))
            if of_heads is not None:
                of_heads.update_(with_constant_column(heads) if shape.output_bias else heads)
            if of_scores:
                for grams, projected in zip(of_scores, dense.queries_keys(attention, x), strict=True):
                    grams.update_(projected)
            if of_ranks:
                of_ranks[attention].update_(dense, x, heads)
                of_ranks[ffn].update_(dense, attended)
            of_neurons.update_(with_constant_column(neurons) if shape.mlp_bias else neurons)
            moments.update_(neurons)
            cosines.add_(functional.cosine_similarity(x.float(), moved.float(), dim=-1).sum())
            rows += len(heads)
            return moved

        self.states.defer(move)
        self.states.settle()
        totals = torch.stack((cosines, torch.full_like(cosines, rows)))
        machine.workers.sum_(totals)
        self._influence.append(1 - float(totals[0] / totals[1]))
        neurons = replace(of_neurons.finish(workers=machine.workers), moments=moments.finish(machine.workers))
        scores = [grams.finish(machine.workers) for grams in of_scores]
        linears = {index: sums.finish(machine.workers, tensors) for index, sums in of_ranks.items()}
        return None if of_heads is None else of_heads.finish(workers=machine.workers), neurons, scores, linears

    def _accumulator(self, tensors: Tensors, sublayer: Sublayer) -> GramAccumulator:
        size = augmented_weight(tensors, sublayer.writer).shape[1]
        return GramAccumulator(size, output_size=None, device=self._machine.device)

    def _profile_heads(self, layer: int, tensors: Tensors, dense: Layer, statistics: Statistics) -> None:
        shape, units, by_group = self._shape, self.head_units, self._head_unit == "kv-group"
        sublayer = self._stack.sublayers[self._stack.index_of("heads")]
        weight = augmented_weight(tensors, sublayer.writer).to(self._machine.device)
        width = shape.num_attention_heads * shape.head_dim
        evidence = Evidence(weight[:, :width], None, statistics.gram[:width, :width], torch.Generator())
        errors, tails = self._head_errors[layer], self._head_tails[layer]

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
        folded = fold_sublayer(tensors, sublayer, shape, factors)
        states = self.states.builder.layer(folded).run(self._stack.index_of("heads"), self._dense)
        states = dense.run(self._stack.index_of("ffn"), states)
        self._probes.append(_Probe("heads", layer, squared_error(factors), states))

    def _profile_values(self, layer: int, tensors: Tensors, statistics: Statistics) -> None:
        shape, name = self._shape, f"{self._stack.attention.out}.weight"
        width = shape.num_attention_heads * shape.head_dim
        weight, gram = tensors[name].to(self._machine.device), statistics.gram[:width, :width]
        groups, full = shape.num_key_value_heads, shape.head_dim
        errors = self._value_errors[layer]
        errors.copy_(value_errors(weight, gram, num_groups=groups, head_dim=full))
        size = probe_size(errors)
        _, restricted = value_subspaces(
            weight, gram, num_groups=groups, head_dim=full, size=size, correct=True, damping=self._damping
        )
        self._add_inner_probe("values", layer, float(errors[size]), tensors | {name: restricted.to(weight)})

    def _profile_scores(self, layer: int, tensors: Tensors, query_grams: torch.Tensor, key_grams: torch.Tensor) -> None:
        rotary, attention = self._stack.rotary, self._stack.attention
        errors = self._query_key_errors[layer]
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
    ) -> None:
        """Measure what one rank of each linear changes in the sublayer's output, from the stream `x` before it."""
        if not linears:
            return
        mixer, whole = self._stack.sublayers[index].mixer, dense.sum(index, x)
        for kind, linear in linears.items():
            errors = linear.errors()
            rank = probe_size(errors, RANK_SHARE)
            reduced = self.states.builder.layer(with_ranks(tensors, mixer, {kind: linear.nearest(rank)}))
            energy = mean_energy(reduced.sum(index, x) - whole)
            scaled = errors * (energy / float(errors[rank].clamp_min(torch.finfo(errors.dtype).tiny)))
            self._rank_errors[layer][RANKED_KINDS.index(kind), : len(errors)] = scaled

    def _add_inner_probe(self, kind: str, layer: int, error: float, tensors: Tensors) -> None:
        reduced = self.states.builder.layer(tensors)
        self._probes.append(_Probe(kind, layer, error, reduced.run_all(self._dense)))

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
        self, layer: int, tensors: Tensors, dense: Layer, statistics: Statistics, attended: torch.Tensor
    ) -> None:
        shape, index = self._shape, self._stack.index_of("ffn")
        sublayer = self._stack.sublayers[index]
        weight = augmented_weight(tensors, sublayer.writer).to(self._machine.device)
        down = weight[:, : shape.intermediate_size]
        gram = statistics.gram[: shape.intermediate_size, : shape.intermediate_size]
        norms = down.double().norm(dim=0)
        order = weighted_pivots(gram, norms, rank=len(gram))
        factor = ordered_factor(gram, order)
        self._ffn_errors[layer] = nested_errors(factor, down[:, order])
        self._ffn_tails[layer] = trailing_norms(factor, norms[order])
        del factor  # as large as the Gram in float64
        evidence = Evidence(down, None, gram, torch.Generator(), moments=statistics.moments)
        self._fluctuation[layer] = column_scores("flap", evidence).cpu()
        if "ffn" not in self._probed:
            return
        columns = order[: probe_size(self._ffn_errors[layer])].sort().values
        factors = self._correct(weight, columns, statistics, shape.mlp_bias)
        reduced = self.states.builder.layer(fold_sublayer(tensors, sublayer, shape, factors))
        total = reduced.sum(index, attended)
        energy = mean_energy(total - dense.sum(index, attended)) if self._has_ranks else 0.0
        self._probes.append(_Probe("ffn", layer, squared_error(factors), reduced.leave(index, total), energy))

    def _correct(self, weight: torch.Tensor, columns: torch.Tensor, statistics: Statistics, has_bias: bool) -> Factors:
        if has_bias:
            columns = torch.cat((columns, columns.new_tensor([weight.shape[1] - 1])))
        return correct(weight, columns, statistics, correction="same-layer", damping=self._damping)


def weighted_norm(evidence: Evidence) -> float:
    """Return `‖R‖_F`, the norm of the weighted columns."""
    assert evidence.gram is not None
    energies = evidence.gram.diagonal().double() * evidence.consumer.double().square().sum(0)
    return float(energies.cpu().sum().sqrt())


def head_tail(evidence: Evidence, columns: torch.Tensor) -> float:
    """Return `‖R22‖_F` of the unpivoted QR of all heads' weighted columns, the kept `columns` first (STAT 3.2)."""
    assert evidence.gram is not None
    goes = torch.ones(len(evidence.gram), dtype=torch.uint8, device=columns.device)
    goes.index_fill_(0, columns, 0)
    order = goes.argsort(stable=True)
    norms = evidence.consumer.double().norm(dim=0)
    return float(trailing_norms(ordered_factor(evidence.gram, order), norms[order])[len(columns)])


def probes_per_layer(kinds: Sequence[str]) -> int:
    """Return how many probes every layer adds for these kinds of `PROBED_KINDS`."""
    return len(kinds) + ("sublayer" in kinds) + ("inner" in kinds) - ("rank" in kinds)


def squared_error(factors: Factors) -> float:
    """Return the relative squared error that the statistics predict."""
    assert factors.predicted_error is not None
    return factors.predicted_error**2


def mean_energy(rows: torch.Tensor) -> float:
    """Return the mean over tokens of the squared norms, for `(…, D)`."""
    return float(rows.double().square().sum(-1).mean())


def probe_size(errors: torch.Tensor, share: float = PROBE_SHARE) -> int:
    """Return how many of a sublayer's n units stay in its probe: this share, or the most with enough error.

    `errors (n + 1,)`: relative squared errors by kept units, falling.
    """
    units = len(errors) - 1
    largest = min(units - 1, max(1, round(share * units)))
    return max(1, int((errors[1 : largest + 1] >= MIN_PROBE_ERROR).sum()))
