"""One dense pass: error curves of every smaller size, and what reduced sublayers do to the model's output.

A few *probe* sequences, of which the statistics have none, pass through the model once for every sublayer that is
reduced alone. Each worker has its part of the statistics' sequences. The workers share out what is computed from a
layer's statistics by its cost (`costs`): one computes a curve and moves its probe. All of them share the experts.
"""

from collections.abc import Callable, Sequence

import torch

from oneshot.architecture import Stack
from oneshot.checkpoint import Model
from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.curvature import Curvature, LayerCurvature
from oneshot.compression.expert_statistics import ExpertStatistics
from oneshot.compression.overflow import naming_the_layer
from oneshot.compression.statistics import Statistics
from oneshot.machine import Machine
from oneshot.machine.memory import release_heap
from oneshot.machine.sharing import Loads
from oneshot.machine.transfer import Uploader
from oneshot.planning import Profile, ProfileOrigin
from oneshot.planning.plan import RemovedUnit
from oneshot.profiling.costs import Task, layer_costs
from oneshot.profiling.embedding import TableProbes
from oneshot.profiling.expert_profile import NarrowerExperts, experts_task
from oneshot.profiling.layer_profile import LayerProfile, Measures
from oneshot.profiling.layer_statistics import LayerStatistics, LayerSums
from oneshot.profiling.probes import (
    PROBED_KINDS,
    Probe,
    Probes,
    SublayerOutput,
    between,
    num_probes,
    probe_sequences,
    probe_text,
    probed_layers,
)
from oneshot.stream import Layer, LayerBuilder, States
from oneshot.tensors import Tensors
from oneshot.text import NUM_KINDS, Text

STATISTICS_SEQUENCES = 32  # curves need fewer tokens than corrections


class LayerProfiler:
    """Profile layers in order: `profile_layer` for each, then `finish`.

    Args:
        head_unit: the heads that are removed together. damping: ridge of the probes' corrections.
        probed: the kinds of `PROBED_KINDS` whose sensitivity is measured; other curves are also left out, except the
            FFN's.
        curvature: output curvature, in whose metric errors of FFNs and of ranks are measured; None for squared errors.

    Attributes:
        text: the text of the statistics. batch: the tokens of the probes.
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
        self._model, self._machine = model, machine
        ranks = "rank" in probed and model.family.may_have_ranks(model.shape)
        reduced = [layer for layer in range(model.shape.num_hidden_layers) if layer not in model.family.dense_layers]
        self._predicts = ranks and curvature is not None
        followed = probed_layers(reduced, self._predicts) if "ffn" in probed else []
        self._measures = Measures(head_unit, damping, probed, ranks, followed)
        self._curvature = curvature
        self._upload = Uploader(machine.device)
        own = text.last(probe_sequences(text.num_sequences))
        rest = text.part(slice(max(1, text.num_sequences - own.num_sequences)))
        self.text = rest.first(STATISTICS_SEQUENCES * text.longest)
        probed_text = probe_text(model, own)
        self._has_kinds = probed_text is not own
        [self.batch] = probed_text.batches(probed_text.num_sequences)
        self.states = States(model, machine, self.text, further=[self.batch], advance=advance)
        self._builder = LayerBuilder(model, machine, probed_text.longest)
        embedded = self._builder.embed(model.read_embedding(), self.batch)
        most = num_probes(probed, model.shape.num_hidden_layers, self._predicts)
        self._probes = Probes(embedded, machine, most, self.states.memory_of_one(self.batch))
        self._curves: list[Tensors] = []
        self._costs: list[float] = []
        self._influence: list[float] = []
        self._loads = Loads(machine.workers.size)

    @property
    def num_probe_tokens(self) -> int:
        """Return the tokens that divergences are means over."""
        return self._probes.num_tokens

    @property
    def other_kinds(self) -> TableProbes | None:
        """Return the probes of other kinds of text, when they have passed all layers; None if there are none."""
        if not self._has_kinds:
            return None
        ids = self.batch.token_ids[-NUM_KINDS:]
        part = self._machine.workers.part(len(ids))
        return TableProbes(self._builder, ids, part, self._probes.dense[-len(ids) :][part].unbind())

    def profile_layer(self, layer: int, tensors: Tensors) -> None:
        """Measure the dense layer's statistics and error curves, and move the probes through it."""
        # 1. The probes of earlier layers pass the dense layer.
        release_heap()  # of the last layer's factorisations
        tensors, stack = self._upload(tensors), self._model.family.stack_of(layer)
        workers, probed = self._machine.workers, self._measures.probed
        of_text = self.states.dense_layer(layer, tensors)
        dense = self._builder.layer(layer, tensors, self._probes.memory)
        self._probes.move(dense)
        curvature = None if self._curvature is None else self._curvature.of_layer(layer, self._machine.device)
        # 2. The layer's statistics, while its text moves through it.
        mixer, ffn = stack.mixer_index, stack.index_of("ffn")
        narrower: NarrowerExperts | None = None
        if stack.experts is not None and "ffn" in probed:
            width = self._model.shape.intermediate_size
            task = experts_task(self._model, self._machine, layer, width // 2, curvature)
            narrower = NarrowerExperts(task, tensors, workers, self._loads)
        with naming_the_layer(layer, lambda: tensors):
            statistics = self._statistics(layer, tensors, of_text, curvature, narrower)
        # 3. The dense outputs on the probe sequences.
        before = self._probes.dense
        of_mixer = self._output(dense, stack, mixer, before, tensors)
        attended = dense.moved(mixer, before, of_mixer.total)
        of_ffn = self._output(dense, stack, ffn, attended, tensors)
        model, machine, measures = self._model, self._machine, self._measures
        profile = LayerProfile(model, machine, self._builder, self._probes, measures, layer, tensors, dense)
        self._influence.append(statistics.influence)
        # 4. Of what this worker has to compute: the curves of attention, and its probes.
        own = self._own_tasks(stack, layer, tensors)
        if (mixer, None) in own:
            if "layer" in probed:
                self._probes.add(Probe("layer", layer), before)
            if "sublayer" in probed:
                self._probes.add(Probe("no heads", layer), dense.run(ffn, before))
            if statistics.heads is not None and "heads" in probed:
                profile.heads(statistics.heads)
            if statistics.heads is not None and "inner" in probed:
                profile.values(statistics.heads)
            if statistics.query_key_grams:
                profile.scores(*statistics.query_key_grams)
        # 5. The curves of linears of low rank.
        for index, output in ((mixer, of_mixer), (ffn, of_ffn)):
            linears = statistics.linears.pop(index, {})
            linears = {kind: linear for kind, linear in linears.items() if (index, kind) in own}
            if linears:
                of_output = None if curvature is None else curvature.ffn if index == ffn else curvature.output
                profile.ranks(index, linears, output, of_output)
            del linears  # what follows needs their memory
            release_heap()
        # 6. The curves of the FFN or of the experts, and their probes.
        if narrower is not None:
            assert isinstance(statistics.neurons, ExpertStatistics)
            narrower.add_(statistics.neurons)
        if (ffn, None) in own:
            metric = None if curvature is None else curvature.ffn
            if "sublayer" in probed:
                self._probes.add(Probe("no ffn", layer), attended)
            if statistics.effects is not None:
                profile.whole_experts(statistics.effects, attended)
            if narrower is not None:
                profile.experts(narrower, of_ffn, metric)
            elif isinstance(statistics.neurons, Statistics):
                profile.ffn(statistics.neurons, of_ffn, metric)
        # 7. The dense probe sequences move on.
        self._curves.append(profile.curves)
        self._costs.append(profile.cost)
        self._probes.dense = dense.moved(ffn, attended, of_ffn.total)

    def _own_tasks(self, stack: Stack, layer: int, tensors: Tensors) -> set[Task]:
        """Return what this worker computes of a layer's curves."""
        with_ranks = self._measures.ranks and layer not in self._model.family.dense_layers
        costs = layer_costs(stack, tensors, self._measures.probed, with_ranks=with_ranks)
        self._loads.begin_stage()
        owners = self._loads.share_out([*costs.values()])
        return {task for task, owner in zip(costs, owners, strict=True) if owner == self._machine.workers.rank}

    def _output(self, dense: Layer, stack: Stack, index: int, x: torch.Tensor, tensors: Tensors) -> SublayerOutput:
        """Return what a sublayer of the dense layer gives for the stream `x` before it."""
        norm = BranchNorm.of(stack.sublayers[index], tensors, self._machine.device) if self._predicts else None
        return SublayerOutput(dense, index, x, norm)

    def finish(self, origin: ProfileOrigin, of_tables: Tensors) -> Profile:
        """Return the profile, with its tensors of tables; the probes pass the final norm and the output head."""
        by_kind, of_stream = self._probes.sensitivities(self.states.builder.output(), len(self._curves))
        costs = torch.tensor(self._costs, dtype=torch.float64)
        self.states.close()
        self._probes.close()
        curves = {name: torch.stack([layer[name] for layer in self._curves]) for name in self._curves[0]}
        measured = (*curves.values(), of_stream, costs, *by_kind.values())
        together = torch.cat([values.flatten() for values in measured]).to(self._machine.device)
        self._machine.workers.sum_(together)  # zeros from all but the owner
        for values, total in zip(measured, together.cpu().split([one.numel() for one in measured]), strict=True):
            values.copy_(total.view_as(values))
        if self._measures.ranks:
            of_stream = between(of_stream)
        if self._predicts:
            by_kind["ffn"] = of_stream * costs
        return Profile(
            **curves,
            ffn_sensitivity=by_kind["ffn"],
            head_sensitivity=by_kind["heads"],
            query_key_sensitivity=by_kind["queries and keys"],
            value_sensitivity=by_kind["values"],
            expert_sensitivity=by_kind["experts"],
            stream_sensitivity=of_stream,
            layer_divergence=by_kind["layer"],
            head_divergence=by_kind["no heads"],
            ffn_divergence=by_kind["no ffn"],
            block_influence=torch.tensor(self._influence, dtype=torch.float64),
            **of_tables,
            origin=origin,
        )

    def _statistics(
        self,
        layer: int,
        tensors: Tensors,
        dense: Layer,
        curvature: LayerCurvature | None,
        narrower: NarrowerExperts | None,
    ) -> LayerStatistics:
        """Sum the layer's statistics while its text moves through it.

        Of several groups of experts, all but the last have been summed before, in passes that do not move the text, and
        `narrower` has taken them.
        """
        model, machine, measures, group = self._model, self._machine, self._measures, None
        if narrower is not None:
            *before, group = narrower.order
            self.states.passes = len(narrower.order)
            for each in before:
                of_group = LayerSums(
                    *(model, machine, layer, tensors, dense),
                    probed=("ffn",),
                    with_ranks=False,
                    has_curvature=False,
                    group=each,
                )
                for x, _ in self.states.read(again=True):
                    of_group(x, False)
                neurons = of_group.finish().neurons
                assert isinstance(neurons, ExpertStatistics)
                self._loads.begin_stage()
                narrower.add_(neurons)
                del of_group, neurons
                release_heap()
        sums = LayerSums(
            *(model, machine, layer, tensors, dense),
            probed=measures.probed,
            with_ranks=measures.ranks,
            has_curvature=curvature is not None,
            group=group,
        )
        self.states.defer(sums)
        self.states.settle()
        self.states.passes = 1
        return sums.finish(curvature)
