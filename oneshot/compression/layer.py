"""One layer through its sublayers: measured, solved and folded, while the streams move on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from oneshot.architecture import Attention, Carried, Experts, FeedForward, Mixer
from oneshot.checkpoint import Model
from oneshot.checkpoint.quantisation import Quantisation
from oneshot.compression.curvature import Curvature
from oneshot.compression.experts import ExpertsTask
from oneshot.compression.fold import confine
from oneshot.compression.layer_folder import fold_layer, on_host
from oneshot.compression.layer_reports import input_reports, left_out_reports, relative_error, sublayer_report
from oneshot.compression.overflow import naming_the_layer, warn_of_overflow
from oneshot.compression.rounding import round_others
from oneshot.compression.rounding_steps import round_factors
from oneshot.compression.sublayer import LayerWork, SublayerTask
from oneshot.compression.subspaces import StreamSubspaces
from oneshot.compression.tasks import AttentionTask, FeedForwardTask
from oneshot.compression.up_proj import correct_up
from oneshot.machine import Machine
from oneshot.machine.memory import release_heap
from oneshot.machine.transfer import Uploader, to_host
from oneshot.method import Method
from oneshot.planning import Grid, Plan
from oneshot.report.records import SublayerReport
from oneshot.stream import DensePass, Layer, States
from oneshot.tensors import Tensors

TASKS: dict[type[Mixer], type[SublayerTask]] = {
    Attention: AttentionTask,
    Carried: SublayerTask,
    FeedForward: FeedForwardTask,
    Experts: ExpertsTask,
}
"""The task of a sublayer by the type of its mixer."""


@dataclass(frozen=True)
class CompressedLayer:
    """A compressed layer: stored tensors, streamed tensors, errors.

    `folded` and `working` are the same tensors unless smaller coordinates or smaller heads were folded, or a sublayer
    was left out, which `working` still has. `scales` are of quantised weights in `folded`, by their names;
    `rounding_errors` of their outputs, by linear, as far as they were rounded between the passes.
    """

    folded: Tensors
    working: Tensors
    reports: list[SublayerReport]
    scales: Tensors = field(default_factory=dict)
    rounding_errors: dict[str, float] = field(default_factory=dict)


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
    stream that is kept inside its subspaces. A smaller head is simulated by a full-size head of lower rank. Only the
    tensors that leave are folded into the smaller coordinates.

    Args:
        states: the hidden states of the text; None if the method chooses by weights alone.
        shared_heads: the heads that stay in stacks whose layers share them, by the stack's prefix.
        curvature: output curvature; None if it was not measured.
        layers_before: layers of another model before this one's first, which messages count.
        quantisation: what linears are rounded to; None: they are not.
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
        layers_before: int = 0,
        quantisation: Quantisation | None = None,
    ) -> None:
        self._model, self._method, self._plan, self._grid, self._machine = model, method, plan, grid, machine
        self._subspaces, self._states, self._seed = subspaces, states, seed
        self._shared_heads, self._curvature, self._layers_before = shared_heads, curvature, layers_before
        self._upload, self._quantisation = Uploader(machine.device), quantisation
        # norms and subspaces that are folded at the end change all linears
        self._rounds_between = states is not None and subspaces is None and not grid.folds_layer_norms

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
        work = LayerWork(self._confined(layer, uploaded))
        with naming_the_layer(self._layers_before + layer, lambda: uploaded):
            if self._states is None:
                self._by_weights(layer, work, tasks)
            else:
                self._by_text(layer, uploaded, work, tasks, self._states)
        warn_of_overflow(self._layers_before + layer, work.reports, uploaded)
        left_out = [task.sublayer for task in tasks if task.is_left_out]
        folded = fold_layer(self._model, self._grid, self._subspaces, layer, work, left_out)
        like = tensors[f"{self._model.family.stack_of(layer).token_mixer.out}.weight"]
        folded, working = on_host(tensors, uploaded, folded, work.working, like.dtype)
        scales = to_host(work.scales)
        if self._quantisation is not None:
            folded = round_others(self._quantisation, self._model.family.stack_of(layer), folded, scales)
        reports = work.reports + left_out_reports(tasks)
        return CompressedLayer(folded, working, reports, scales, work.rounding_errors)

    def _by_weights(self, layer: int, work: LayerWork, tasks: list[SublayerTask]) -> None:
        """Compress a layer whose neurons are chosen by weights alone."""
        work.reports += self._input_reports(layer)
        for task in tasks:
            if task.is_reduced:
                units, factors, values = task.solve(work.working, None)
                work.working = task.fold(work.working, factors)
                task.keep_(work, units, values)
                work.reports.append(sublayer_report(task, factors, None))

    def _by_text(
        self, layer: int, tensors: Tensors, work: LayerWork, tasks: list[SublayerTask], states: States
    ) -> None:
        """Compress a layer by what the text says about its activations."""
        # 1. The streams reach the layer; its text passes are counted.
        self._enter(layer, states)
        states.passes = self._passes(tasks, states)
        dense = states.dense_layer(layer, tensors)
        current = reference = (
            states.as_compressed(dense) if work.working is tensors else states.layer(layer, work.working)
        )
        if self._norms_inside:
            current = self._current(layer, work.working, states)
        work.reports += self._input_reports(layer, dense, states)
        solved = []
        for task in tasks:
            dense_pass = DensePass(task.index, dense)
            if task.is_left_out:
                states.defer_dense(dense_pass)
                continue
            # 2. Smaller scores, low ranks, fewer experts: what is decided before the writer is measured.
            for reduce_ in task.reductions:
                reduce_(work, states, current)
                current = self._current(layer, work.working, states)
            if task.passes > 1:
                states.settle()  # the first of them
            states.defer_dense(dense_pass)  # to the pass that measures, which reads what it keeps
            if not task.is_solved:
                states.defer(_Pass(task, current))
                continue
            # 3. Sums of what the writer reads, on the compressed stream, and the target from the dense one.
            statistics, target = task.measure(work.working, states, current, reference, dense_pass)
            del current
            if task is tasks[-1]:
                del dense, reference, dense_pass  # the factorisation needs their memory
            release_heap()
            # 4. The workers choose the units that stay and correct the writer over their columns.
            units, factors, values = task.solve(work.working, statistics)
            if task.rounds:
                units, factors = round_factors(task, work, units, factors, statistics)
            del statistics
            work.working = task.fold(work.working, factors)
            task.keep_(work, units, values)
            if task.corrects_up:
                factors = correct_up(task, tensors, work, states)
            release_heap()
            # 5. The compressed stream moves on through the smaller sublayer, with the next pass.
            current = self._current(layer, work.working, states)
            solved.append((task, factors, _Pass(task, current, target)))
            states.defer(solved[-1][2])
        states.settle()
        work.reports += [sublayer_report(task, factors, passed.error) for task, factors, passed in solved]

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
            TASKS[type(sublayer.mixer)](
                method=self._method,
                shape=self._model.shape.of(layer),
                plan=self._plan,
                subspaces=self._subspaces,
                machine=self._machine,
                stack=stack,
                layer=layer,
                index=index,
                seed=self._seed,
                shared_heads=self._shared_heads.get(stack.layers) if sublayer.kind == "heads" else None,
                curvature=None if self._curvature is None else self._curvature.of_layer(layer, self._machine.device),
                has_dense=self._states is not None and self._states.dense_share > 0,
                layers_before=self._layers_before,
                quantisation=self._quantisation if self._rounds_between else None,
            )
            for index, sublayer in enumerate(stack.sublayers)
        ]

    @staticmethod
    def _passes(tasks: list[SublayerTask], states: States) -> float:
        """Return how many passes over the text the layer takes."""
        return 1 + sum(task.all_passes(states) for task in tasks if not task.is_left_out)

    def _confined(self, layer: int, tensors: Tensors) -> Tensors:
        """Return the layer with outputs inside the subspaces that read them."""
        if self._subspaces is None or self._norms_inside:
            return tensors
        confined, stack = tensors, self._model.family.stack_of(layer)
        for index, sublayer in enumerate(stack.sublayers):
            after = self._subspaces.basis(stack.position(layer, index + 1))
            confined = confine(confined, sublayer.writer, after)
        return confined

    def _input_reports(
        self, layer: int, dense: Layer | None = None, states: States | None = None
    ) -> list[SublayerReport]:
        """Return what the subspaces leave out before every norm; measured on the judged batch if there is text."""
        if self._subspaces is None:
            return []
        judged = None if states is None or self._norms_inside else states.read_judged()[1]
        return input_reports(self._model, self._subspaces, layer, self._method.token_weighting, dense, judged)
