"""The dense model, layer by layer: what every smaller size of every block would cost, and what that does to the output.

A few *probe* sequences, not among those of the statistics, walk through the model once for every block that is reduced
alone, all of them side by side, so that every layer is read once. Of several workers each has its part of the
statistics' sequences, and they take turns with the blocks: one finds a block's curve, and carries its probe.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

from oneshot.arch.base import DOWN_PROJ, O_PROJ
from oneshot.config import CompressionConfig
from oneshot.embedding import expanded, range_errors, reduce_embedding
from oneshot.factorise import correct
from oneshot.fold import augmented_weight, fold_ffn, fold_heads, head_columns
from oneshot.layerwise.streams import Streams, Tensors
from oneshot.linalg.interpolative import nested_errors
from oneshot.linalg.pivoted_qr import weighted_pivots
from oneshot.output_head import OutputHead
from oneshot.plan import smaller_tables
from oneshot.records import BlockStatistics, CalibrationSet, Factors, Profile, ProfileOrigin, TableShape
from oneshot.selection import Evidence, column_scores, select_heads
from oneshot.source import SourceModel
from oneshot.statistics import GramAccumulator, MomentAccumulator, with_constant_column
from oneshot.stream import StreamLayer, release_heap
from oneshot.workers import ALONE, Workers

STATISTICS_SEQUENCES = 32  # curves need fewer tokens than corrections do
PROBE_SEQUENCES = 2
PROBED_KINDS = ("ffn", "heads", "layer")
PROBE_SHARE = 3 / 4  # of a block's neurons or heads stays where it is reduced alone; less where that errs by nothing
EMBEDDING_PROBE_SHARES = (3 / 5, 2 / 5, 1 / 5)  # of its parameters: large steps cost more for each than small ones
EMBEDDING_PROBES = 8  # sequences: what is lost is lost in a few places
EMBEDDING_TASK = 0  # of the worker that decomposes the embedding
FELT_ERROR = 1e-4  # relative and squared: what a probe that errs by less diverges by is rounding


@dataclass(frozen=True)
class _Probe:
    """Hidden states of the probe sequences in a model of which one block of one layer is reduced, or the layer is out.

    `error` is the relative squared error of the reduced block's own output.
    """

    kind: str
    layer: int
    error: float
    states: torch.Tensor


class LayerProfiler:
    """Profiles layers in order: `embed` once, `profile_layer` for each, `profile_embedding` if wanted, `finish`.

    `probed` are the kinds of blocks whose sensitivity is measured, of `PROBED_KINDS`.
    """

    def __init__(
        self,
        config: CompressionConfig,
        source: SourceModel,
        head_unit: str,
        *,
        probed: Sequence[str] = PROBED_KINDS,
        device: torch.device,
        dtype: torch.dtype,
        scratch: Path,
        tier: str,
        workers: Workers = ALONE,
    ) -> None:
        self._config, self._source, self._shape = config, source, source.shape
        self._head_unit, self._probed, self._device = head_unit, probed, device
        self._workers = workers
        self._streams = Streams(
            config,
            source,
            None,
            two=False,
            device=device,
            dtype=dtype,
            scratch=scratch,
            tier=tier,
            workers=workers,
        )
        self._ffn_errors: list[torch.Tensor] = []
        self._head_errors: list[torch.Tensor] = []
        self._fluctuation: list[torch.Tensor] = []
        self._influence: list[float] = []
        self._probes: list[_Probe] = []
        self._embedding_gram = self._embedding_errors = torch.empty(0, 0, dtype=torch.float64)
        self._embedding_sensitivity = torch.zeros(1, dtype=torch.float64)
        self._probabilities = torch.empty(0)

    @property
    def head_units(self) -> int:
        """Head units of a layer: KV groups, or query heads of a group; 1 where the family's heads cannot be removed."""
        if not self._source.architecture.removable_heads:
            return 1
        return self._shape.num_key_value_heads if self._head_unit == "kv-group" else self._shape.heads_per_group

    @property
    def num_probe_tokens(self) -> int:
        """Tokens that divergences are means over."""
        return self._dense.shape[0] * self._dense.shape[1]

    def embed(self, calibration: CalibrationSet) -> None:
        """Fill the activation store with the first sequences; the last become the probes."""
        tokens = calibration.token_ids
        probes = min(PROBE_SEQUENCES, max(1, len(tokens) // 2))
        counted = min(STATISTICS_SEQUENCES, max(1, len(tokens) - probes))
        self.num_tokens = counted * tokens.shape[1]
        self._streams.embed(replace(calibration, token_ids=tokens[:counted]))
        self._tokens, self._part = tokens[:counted], self._workers.part(counted)
        self._dense = self._streams.embedded(tokens[-probes:])

    def profile_layer(self, layer: int, tensors: Tensors, advance: Callable[[float], None]) -> None:
        """Statistics of the dense layer, its error curves, and its probes."""
        release_heap()  # of the last layer's factorisations
        dense = self._streams.layer(tensors)
        for probe in self._probes:
            probe.states.copy_(dense.ffn(dense.attention(probe.states)))
        heads, neurons = self._statistics(tensors, dense, advance)
        attended = dense.attention(self._dense)
        self._head_errors.append(torch.zeros(self.head_units + 1, dtype=torch.float64))
        self._ffn_errors.append(torch.zeros(self._shape.intermediate_size + 1, dtype=torch.float64))
        self._fluctuation.append(torch.zeros(self._shape.intermediate_size, dtype=torch.float64))
        if self._workers.owns(2 * layer):
            if "layer" in self._probed:
                self._probes.append(_Probe("layer", layer, 1.0, self._dense.clone()))
            self._profile_heads(layer, tensors, dense, heads)
        if self._workers.owns(2 * layer + 1):
            release_heap()
            self._profile_ffn(layer, tensors, neurons, attended)
        self._dense = dense.ffn(attended)

    def profile_embedding(self, whole: Sequence[int], layers: Callable[[], Iterable[Tensors]]) -> None:
        """What ranks of the vocabulary's ranges cost, and what a reduced embedding does to the output.

        What the output head reads is known behind the last layer only, so a few of the sequences walk through all
        `layers` again. `whole`: tokens whose ranges stay whole.
        """
        head = self._streams.output_head()
        gram, probabilities, last = self._read_by_head(head)
        embedding = self._source.checkpoint.read_one(self._source.architecture.embedding)
        errors = self._workers.share(EMBEDDING_TASK, lambda: range_errors(embedding, gram, probabilities, whole).cpu())
        tables, lost = embedding_probe(errors, len(embedding))
        total, count = torch.zeros(2, dtype=torch.float64, device=self._device)
        if last:
            reduced = expanded(reduce_embedding(embedding, gram, probabilities, tables), embedding.shape[1])
            total += self._divergence_of_embedding(reduced, head, last, layers)
            count += len(last)
        self._workers.sum_(total, count)
        self._embedding_sensitivity[0] = max(0.0, float(total / count)) / max(lost, FELT_ERROR)
        self._embedding_gram, self._probabilities, self._embedding_errors = gram.cpu(), probabilities.cpu(), errors

    def _read_by_head(self, head: OutputHead) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """The mean `h hᵀ (D, D)` float64 over the stream, the tokens' probabilities, the probes' last states.

        Both of the latter are of the first sequences, the states of this worker's part of them.
        """
        accumulator = GramAccumulator(self._shape.hidden_size, output_size=None, device=self._device)
        last: list[torch.Tensor] = []
        for batch, x, _ in self._streams.read():
            accumulator.update_(head.norm(x).flatten(0, -2))
            last += list(x[: max(0, EMBEDDING_PROBES - self._part.start - batch.start)].clone())
        gram = accumulator.finish(workers=self._workers).gram.double() / self.num_tokens
        probabilities = torch.zeros(self._shape.vocab_size, device=self._device)
        for states in last:
            probabilities += head.probabilities(states)
        count = torch.tensor(len(last), device=self._device)
        self._workers.sum_(probabilities, count)
        return gram, probabilities / count, last

    def _divergence_of_embedding(
        self,
        reduced: torch.Tensor,
        head: OutputHead,
        last: list[torch.Tensor],
        layers: Callable[[], Iterable[Tensors]],
    ) -> float:
        """KL divergence of the output with an embedding `(N, D)`, from the states `last`: means, summed over them."""
        probes = self._streams.embedded(self._tokens[self._part][: len(last)], reduced)
        for tensors in layers():
            layer = self._streams.layer(tensors)
            for probe in probes.split(1):
                probe.copy_(layer.ffn(layer.attention(probe)))
        other = replace(head, weight=reduced.to(head.weight))
        return sum(
            float(other.divergence_from(head, states, probe).double().mean())
            for states, probe in zip(last, probes, strict=True)
        )

    def finish(self, origin: ProfileOrigin) -> Profile:
        """The profile; the probes go through the last norm and the output head."""
        divergences = self._divergences()
        self._streams.close()
        by_kind = {kind: torch.zeros(len(self._influence), dtype=torch.float64) for kind in PROBED_KINDS}
        for probe, divergence in zip(self._probes, divergences, strict=True):
            by_kind[probe.kind][probe.layer] = divergence / max(probe.error, FELT_ERROR)
        ffn_errors, head_errors = torch.stack(self._ffn_errors), torch.stack(self._head_errors)
        fluctuation = torch.stack(self._fluctuation)
        for values in (
            ffn_errors,
            head_errors,
            fluctuation,
            *by_kind.values(),
        ):  # what a worker does not own is zero there
            found = values.to(self._device)
            self._workers.sum_(found)
            values.copy_(found)
        return Profile(
            ffn_errors=ffn_errors,
            head_errors=head_errors,
            ffn_sensitivity=by_kind["ffn"],
            head_sensitivity=by_kind["heads"],
            layer_divergence=by_kind["layer"],
            block_influence=torch.tensor(self._influence, dtype=torch.float64),
            ffn_fluctuation=fluctuation,
            embedding_gram=self._embedding_gram,
            embedding_probabilities=self._probabilities,
            embedding_errors=self._embedding_errors,
            embedding_sensitivity=self._embedding_sensitivity,
            origin=origin,
        )

    def _divergences(self) -> list[float]:
        """Mean KL divergence of every probe's output from the dense model's, a sequence of logits at a time."""
        head = self._streams.output_head()
        totals = [0.0] * len(self._probes)
        for sequence, dense_state in enumerate(self._dense):
            dense = head.prediction(dense_state)
            for index, probe in enumerate(self._probes):
                totals[index] += float(head.divergence(dense, probe.states[sequence]).double().mean())
        return [max(0.0, total / len(self._dense)) for total in totals]

    def _statistics(
        self, tensors: Tensors, dense: StreamLayer, advance: Callable[[float], None]
    ) -> tuple[BlockStatistics, BlockStatistics]:
        """Of what `o_proj` and `down_proj` consume; moves the stream on."""
        shape = self._shape
        sizes = (augmented_weight(tensors, linear).shape[1] for linear in (O_PROJ, DOWN_PROJ))
        of_heads, of_neurons = (GramAccumulator(size, output_size=None, device=self._device) for size in sizes)
        moments = MomentAccumulator(shape.intermediate_size, device=self._device)
        cosines, rows = 0.0, 0
        for batch, x, _ in self._streams.read():
            heads = dense.heads(x)
            attended = x + dense.project_heads(heads).view_as(x)
            neurons = dense.neurons(attended)
            moved = attended + dense.project_neurons(neurons).view_as(x)
            of_heads.update_(with_constant_column(heads) if shape.output_bias else heads)
            of_neurons.update_(with_constant_column(neurons) if shape.mlp_bias else neurons)
            moments.update_(neurons)
            cosines += float(functional.cosine_similarity(x.float(), moved.float(), dim=-1).double().sum())
            rows += len(heads)
            self._streams.write(batch, moved)
            advance(len(heads))
        totals = torch.tensor([cosines, rows], dtype=torch.float64, device=self._device)
        self._workers.sum_(totals)
        self._influence.append(1 - float(totals[0] / totals[1]))
        neuron_statistics = of_neurons.finish(workers=self._workers)
        return of_heads.finish(workers=self._workers), replace(neuron_statistics, moments=moments.finish(self._workers))

    def _profile_heads(self, layer: int, tensors: Tensors, dense: StreamLayer, statistics: BlockStatistics) -> None:
        shape, units, by_group = self._shape, self.head_units, self._head_unit == "kv-group"
        weight = augmented_weight(tensors, O_PROJ).to(self._device)
        width = shape.num_attention_heads * shape.head_dim
        consumer = weight[:, :width]
        evidence = Evidence(consumer, consumer.new_zeros(width), statistics.gram[:width, :width], torch.Generator())
        errors = self._head_errors[layer]

        def reduce(kept: int) -> tuple[torch.Tensor, Factors]:
            heads = select_heads(
                "id",
                evidence,
                num_groups=shape.num_key_value_heads,
                heads_per_group=shape.heads_per_group,
                kept_groups=kept if by_group else shape.num_key_value_heads,
                kept_heads_per_group=shape.heads_per_group if by_group else kept,
            )
            return heads, self._correct(weight, head_columns(heads, shape.head_dim), statistics, shape.output_bias)

        errors[0] = 1.0
        for kept in range(1, units):
            errors[kept] = squared_error(reduce(kept)[1])
        if "heads" not in self._probed or units == 1:
            return
        probed = probe_size(errors)
        heads, factors = reduce(probed)
        folded = fold_heads(
            tensors, factors, heads=heads, heads_per_group=shape.heads_per_group, head_dim=shape.head_dim
        )
        states = dense.ffn(self._streams.layer(folded).attention(self._dense))
        self._probes.append(_Probe("heads", layer, float(errors[probed]), states))

    def _profile_ffn(self, layer: int, tensors: Tensors, statistics: BlockStatistics, attended: torch.Tensor) -> None:
        shape = self._shape
        weight = augmented_weight(tensors, DOWN_PROJ).to(self._device)
        down = weight[:, : shape.intermediate_size]
        gram = statistics.gram[: shape.intermediate_size, : shape.intermediate_size]
        order = weighted_pivots(gram, down.double().norm(dim=0), rank=len(gram))
        self._ffn_errors[layer] = nested_errors(gram, down, order).cpu()
        evidence = Evidence(down, down.new_zeros(len(order)), gram, torch.Generator(), moments=statistics.moments)
        self._fluctuation[layer] = column_scores("flap", evidence).cpu()
        if "ffn" not in self._probed:
            return
        kept = order[: probe_size(self._ffn_errors[layer])].sort().values
        factors = self._correct(weight, kept, statistics, shape.mlp_bias)
        reduced = self._streams.layer(fold_ffn(tensors, factors))
        self._probes.append(_Probe("ffn", layer, squared_error(factors), reduced.ffn(attended)))

    def _correct(
        self, weight: torch.Tensor, columns: torch.Tensor, statistics: BlockStatistics, has_bias: bool
    ) -> Factors:
        if has_bias:
            columns = torch.cat((columns, columns.new_tensor([weight.shape[1] - 1])))
        return correct(weight, columns, statistics, correction="same-layer", damping=self._config.fixed_damping)


def squared_error(factors: Factors) -> float:
    """The relative squared error that the statistics predict."""
    assert factors.predicted_error is not None
    return factors.predicted_error**2


def probe_size(errors: torch.Tensor) -> int:
    """How many of a block's n units stay in its probe: `PROBE_SHARE` of them, or the most with which it errs enough.

    `errors (n + 1,)`: relative squared errors by units kept, falling.
    """
    units = len(errors) - 1
    largest = min(units - 1, max(1, round(PROBE_SHARE * units)))
    return max(1, int((errors[1 : largest + 1] >= FELT_ERROR).sum()))


def embedding_probe(errors: torch.Tensor, vocab_size: int) -> tuple[tuple[TableShape, ...], float]:
    """The ranks of the reduced embedding that is tried out, and the squared error that they leave.

    The largest of `EMBEDDING_PROBE_SHARES` that errs enough; `errors` as in `smaller_tables`.
    """
    for share in EMBEDDING_PROBE_SHARES:
        tables = smaller_tables(errors, vocab_size, share)
        lost = sum(float(errors[index, table.rank]) for index, table in enumerate(tables))
        if lost >= FELT_ERROR:
            break
    return tables, lost
