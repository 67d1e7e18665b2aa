"""One layer through its sublayers: measured, solved and folded, while the streams move on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from oneshot.checkpoint import Model
from oneshot.compression.curvature import Curvature
from oneshot.compression.expert_removal import keep_experts, measure_effects
from oneshot.compression.fold import confine
from oneshot.compression.inner_heads import InnerMaps, keep_heads, reduce_queries_keys
from oneshot.compression.layer_folder import LayerFolder, Ranks
from oneshot.compression.layer_reports import input_reports, left_out_reports, removal_report, sublayer_report
from oneshot.compression.measuring import relative_error
from oneshot.compression.ranks import RankAccumulator, with_ranks
from oneshot.compression.statistics import batches_apart
from oneshot.compression.sublayer import SublayerTask
from oneshot.compression.subspaces import StreamSubspaces
from oneshot.compression.up_proj import correct_up, up_passes
from oneshot.compression.ways import way_of
from oneshot.families import Attention
from oneshot.machine import Machine
from oneshot.machine.memory import release_heap
from oneshot.machine.transfer import Uploader, to_host
from oneshot.planning import Grid, Plan
from oneshot.recipes import Method
from oneshot.report.records import SublayerReport
from oneshot.stream import DensePass, Layer, States
from oneshot.tensors import Tensors

# the working layer, maps of heads and linears of low rank of its sublayers by their index, what was lost
Solved = tuple[Tensors, dict[int, InnerMaps], dict[int, Ranks], list[SublayerReport]]


@dataclass(frozen=True)
class CompressedLayer:
    """A compressed layer: stored tensors, streamed tensors, errors.

    `folded` and `working` are the same tensors unless smaller coordinates or smaller heads were folded, or a sublayer
    was left out, which `working` still has.
    """

    folded: Tensors
    working: Tensors
    reports: list[SublayerReport]


class _Pass:
    """A deferred sublayer step of the compressed stream; it measures the error on the judged batch.

    `target`: what the sublayer should add to that batch; None if the sublayer is unchanged.
    """

    def __init__(self, task: SublayerTask, layer: Layer, target: torch.Tensor | None = None) -> None:
        self._task, self._layer, self._target = task, layer, target
        self.error: float | None = None

    def __call__(self, x: torch.Tensor, is_judged: bool) -> torch.Tensor:
        total = self._layer.sum(self._task.index, x)
        if is_judged and self._target is not None:
            self.error = relative_error(self._target, total - self._layer.base(self._task.index, x))
        return self._task.enter(self._layer.moved(self._task.index, x, total))


class LayerCompressor:
    """Compress the layers of a model in order.

    Everything is computed in the model's own coordinates, on layers of the stock class. A smaller hidden size is a
    stream that is kept inside its subspaces. Smaller heads are full heads that compute what the smaller ones can. Only
    the tensors that leave are folded into the smaller coordinates.

    Args:
        states: the hidden states of the text; None if the method chooses by weights alone.
        shared_heads: the heads that stay in stacks whose layers share them, by the stack's prefix.
        curvature: output curvature; None if it was not measured.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        plan: Plan,
        grid: Grid,
        machine: Machine,
        *,
        subspaces: StreamSubspaces | None = None,
        states: States | None = None,
        shared_heads: Mapping[str, torch.Tensor] = MappingProxyType({}),
        curvature: Curvature | None = None,
        seed: int = 0,
    ) -> None:
        self._model, self._method, self._plan, self._machine = model, method, plan, machine
        self._subspaces, self._states, self._seed = subspaces, states, seed
        self._shared_heads, self._curvature = shared_heads, curvature
        self._upload = Uploader(machine.device)
        self._folder = LayerFolder(model, grid, subspaces)

    def replay_layer(self, layer: int, tensors: Tensors, working: Tensors) -> None:
        """Move the streams through a layer that another run finished: its dense tensors and its `working` ones."""
        states = self._states
        if states is None:
            return
        self._enter(layer, states)
        states.passes = 1
        dense = states.dense_layer(layer, self._upload(tensors))
        current = self._current(layer, self._upload(working), states) if working else None
        for task in self._tasks(layer):
            states.defer_dense(DensePass(task.index, dense))
            if current is not None and not task.is_left_out:
                states.defer(_Pass(task, current))
        states.settle()

    def compress_layer(self, layer: int, tensors: Tensors) -> CompressedLayer:
        """Return the layer's smaller tensors, on the host, and what was lost.

        On a CUDA device everything is computed from one copy of the layer; what did not change is not copied back.
        """
        release_heap()  # of the last layer's factorisation
        tasks = self._tasks(layer)
        if self._plan.layers[layer].is_left_out:
            self.replay_layer(layer, tensors, {})
            return CompressedLayer({}, {}, left_out_reports(tasks))
        uploaded = self._upload(tensors)
        working = self._confined(layer, uploaded)
        if self._states is None:
            working, maps, ranks, reports = self._by_weights(layer, working, tasks)
        else:
            working, maps, ranks, reports = self._by_text(layer, uploaded, working, tasks, self._states)
        folded, working = self._fold(layer, tensors, uploaded, working, maps, ranks)
        return CompressedLayer(folded, working, reports)

    def _by_weights(self, layer: int, working: Tensors, tasks: list[SublayerTask]) -> Solved:
        """Compress a layer whose neurons are chosen by weights alone."""
        reports, maps = self._input_reports(layer), dict[int, InnerMaps]()
        for task in tasks:
            if task.is_reduced:
                way = way_of(task)
                units, factors, _ = way.solve(task, working, None)
                working = way.fold(task, working, factors)
                maps[task.index] = self._with_heads(task, InnerMaps(), units)
                reports.append(sublayer_report(task, factors, None))
        return working, maps, {}, reports + left_out_reports(tasks)

    def _by_text(
        self, layer: int, tensors: Tensors, working: Tensors, tasks: list[SublayerTask], states: States
    ) -> Solved:
        """Compress a layer by what the text says about its activations."""
        self._enter(layer, states)
        states.passes = self._passes(tasks, states)
        dense = states.dense_layer(layer, tensors)
        current = reference = states.as_compressed(dense) if working is tensors else states.layer(layer, working)
        if self._norms_inside:
            current = self._current(layer, working, states)
        inputs = self._input_reports(layer, dense, states)
        maps, ranks = dict[int, InnerMaps](), dict[int, Ranks]()
        solved, removed = [], list[SublayerReport]()
        for task in tasks:
            dense_pass = DensePass(task.index, dense)
            if task.is_left_out:
                states.defer_dense(dense_pass)
                continue
            if task.is_attention and task.kept.query_key_size is not None:
                working, maps[task.index] = self._reduce_queries_keys(task, working, states, current)
                current = self._current(layer, working, states)
            if task.ranks:
                working, ranks[task.index] = self._reduce_ranks(task, working, states, current)
                current = self._current(layer, working, states)
            if task.loses_experts:
                sums = measure_effects(task, working, states, current)
                working = keep_experts(task, working, sums)
                current = self._current(layer, working, states)
                removed.append(removal_report(task, sums))
            states.defer_dense(dense_pass)  # to the pass that measures, which reads what it keeps
            if not task.is_solved:
                states.defer(_Pass(task, current))
                continue
            way = way_of(task)
            statistics, target = way.measure(task, working, states, current, reference, dense_pass)
            del current
            if task is tasks[-1]:
                del dense, reference, dense_pass  # the factorisation needs their memory
            release_heap()
            units, factors, values = way.solve(task, working, statistics)
            working = way.fold(task, working, factors)
            if task.is_reduced and not task.is_attention:
                ranks[task.index] = {kind: one.rows(units) for kind, one in ranks.get(task.index, {}).items()}
            if task.is_attention:
                kept = keep_heads(maps.get(task.index, InnerMaps()), units, self._model.shape.heads_per_group)
                kept = kept if values is None else replace(kept, values=values)
                maps[task.index] = self._with_heads(task, kept, units)
            del statistics
            if task.corrects_up:
                working, factors = correct_up(task, tensors, working, states)
            release_heap()
            current = self._current(layer, working, states)
            solved.append((task, factors, _Pass(task, current, target)))
            states.defer(solved[-1][2])
        states.settle()
        reports = [sublayer_report(task, factors, passed.error) for task, factors, passed in solved]
        return working, maps, ranks, inputs + removed + reports + left_out_reports(tasks)

    @staticmethod
    def _with_heads(task: SublayerTask, maps: InnerMaps, heads: torch.Tensor) -> InnerMaps:
        """Return the maps with the heads that are cut at the end, if the layer has fixed heads until then."""
        mixer = task.sublayer.mixer
        cuts = isinstance(mixer, Attention) and mixer.fixed_heads and task.is_reduced
        return replace(maps, heads=heads) if cuts else maps

    @property
    def _norms_inside(self) -> bool:
        """Return whether norms after the sublayers keep the stream inside its subspaces."""
        return self._subspaces is not None and self._model.family.stack.norms_after

    def _current(self, layer: int, working: Tensors, states: States) -> Layer:
        """Return the layer that the compressed stream passes."""
        current, subspaces = states.layer(layer, working), self._subspaces
        if subspaces is not None and self._norms_inside:
            first = self._model.family.stack.position(layer) + 1
            current.replace_norms(lambda index, norm: subspaces.norm(norm, first + index))
        return current

    def _enter(self, layer: int, states: States) -> None:
        """Move the states on to the decoder if the layer is its first."""
        subspaces, stack = self._subspaces, self._model.family.stack_of(layer)
        if layer == stack.first_layer > 0:
            states.enter_decoder()
            if subspaces is not None:
                states.defer(lambda x, _: subspaces.inside(x, stack.first_position))
                states.settle()

    def _tasks(self, layer: int) -> list[SublayerTask]:
        stack = self._model.family.stack_of(layer)
        return [
            SublayerTask(
                self._method,
                self._model.shape,
                self._plan,
                self._subspaces,
                self._machine,
                stack,
                layer,
                index,
                self._seed,
                self._shared_heads.get(stack.layers) if sublayer.kind == "heads" else None,
                None if self._curvature is None else self._curvature.of_layer(layer, self._machine.device),
            )
            for index, sublayer in enumerate(stack.sublayers)
        ]

    def _passes(self, tasks: list[SublayerTask], states: States) -> float:
        """Return how many passes over the text the layer takes."""
        tasks = [task for task in tasks if not task.is_left_out]
        extra: float = sum(task.is_attention and task.kept.query_key_size is not None for task in tasks)
        extra += sum(1 + states.share_read(self._ranks_every(states)) for task in tasks if task.ranks)
        extra += sum(task.loses_experts for task in tasks)
        return 1 + extra + sum(task.is_solved + (up_passes(task, states) if task.corrects_up else 0) for task in tasks)

    def _reduce_queries_keys(
        self, task: SublayerTask, working: Tensors, states: States, current: Layer
    ) -> tuple[Tensors, InnerMaps]:
        assert task.kept.query_key_size is not None
        assert isinstance(task.sublayer.mixer, Attention)
        return reduce_queries_keys(
            working,
            task.sublayer.mixer,
            task.index,
            self._model.shape,
            states,
            current,
            size=task.kept.query_key_size,
            rotary=task.stack.rotary,
            share=task.shared,
        )

    def _ranks_every(self, states: States) -> int:
        """Return n if each n-th batch is read for the ranks of linears."""
        return batches_apart(states.num_tokens, self._model.shape.hidden_size)

    def _reduce_ranks(
        self, task: SublayerTask, working: Tensors, states: States, current: Layer
    ) -> tuple[Tensors, Ranks]:
        """Return the layer whose sublayer has linears of low rank, and these."""
        mixer = task.sublayer.mixer
        states.settle()
        sums = RankAccumulator(self._model.shape, task.sublayer, task.index, self._machine.device)
        for x, _ in states.read(self._ranks_every(states)):
            sums.update_(current, x)
        linears = sums.finish(self._machine.workers, working, task.curvature)
        ranks = task.shared(lambda: {kind: linears[kind].nearest(rank) for kind, rank in task.ranks.items()})
        return with_ranks(working, mixer, ranks), ranks

    def _confined(self, layer: int, tensors: Tensors) -> Tensors:
        """Return the layer with outputs inside the subspaces that read them."""
        if self._subspaces is None or self._norms_inside:
            return tensors
        confined, stack = tensors, self._model.family.stack_of(layer)
        for index, sublayer in enumerate(stack.sublayers):
            after = self._subspaces.basis(stack.position(layer, index + 1))
            confined = confine(confined, sublayer.writer, after)
        return confined

    def _fold(
        self,
        layer: int,
        tensors: Tensors,
        uploaded: Tensors,
        working: Tensors,
        maps: dict[int, InnerMaps],
        ranks: dict[int, Ranks],
    ) -> tuple[Tensors, Tensors]:
        """Return what the checkpoint stores of a layer, and `working`, on the host.

        Tensors that did not change since they were uploaded are the input's.
        """
        left_out = [task.sublayer for task in self._tasks(layer) if task.is_left_out]
        folded = self._folder.fold(layer, working, maps, ranks, left_out)
        like = tensors[f"{self._model.family.stack_of(layer).attention.out}.weight"]
        folded = {
            name: tensor.to(tensors.get(name, like).dtype) if tensor.is_floating_point() else tensor
            for name, tensor in folded.items()
        }
        host = {id(tensor): tensors[name] for name, tensor in uploaded.items()}
        changed = {id(tensor): tensor for tensor in (*folded.values(), *working.values()) if id(tensor) not in host}
        copies = to_host({str(key): tensor for key, tensor in changed.items()})
        host |= {key: copies[str(key)] for key in changed}
        return (
            {name: host[id(tensor)] for name, tensor in folded.items()},
            {name: host[id(tensor)] for name, tensor in working.items()},
        )

    def _input_reports(
        self, layer: int, dense: Layer | None = None, states: States | None = None
    ) -> list[SublayerReport]:
        """Return what the subspaces leave out before every norm; measured on the judged batch if there is text."""
        if self._subspaces is None:
            return []
        judged = None if states is None or self._norms_inside else states.read_judged()[1]
        return input_reports(self._model, self._subspaces, layer, self._method.token_weighting, dense, judged)
