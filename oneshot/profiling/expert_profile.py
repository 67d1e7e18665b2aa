"""What narrower experts cost in one layer of a mixture: statistics of all its experts, and their one error curve.

The same pass sums what whole experts do (`expert_counts`).

All experts of a layer keep equally many neurons, each its own, as a run chooses and corrects them. Errors of different
experts are taken as orthogonal, so the layer's error is the sum of theirs. A shared expert that shrinks with them is
one more.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from oneshot.checkpoint import Model
from oneshot.compression.correction import predicted_energies, relative
from oneshot.compression.curvature import LayerCurvature, root_of
from oneshot.compression.expert_removal import add_effects_
from oneshot.compression.expert_scores import ExpertSums
from oneshot.compression.expert_statistics import ExpertAccumulator, ExpertStatistics
from oneshot.compression.experts import MeasuredExperts, evidence_of, factors_of, fold_experts
from oneshot.compression.fold import augmented_weight
from oneshot.compression.mixture_norms import MixtureNorms
from oneshot.compression.shared_expert import shared_accumulator
from oneshot.compression.tasks import ExpertsTask
from oneshot.linalg.interpolative import missed_energies, ordered_factor
from oneshot.linalg.pivoted_qr import weighted_pivots
from oneshot.machine import ALONE, Machine, Workers
from oneshot.planning import dense_plan
from oneshot.recipes import Method
from oneshot.selection import pivots_of_experts
from oneshot.stream import Layer
from oneshot.tensors import Tensors


def experts_task(
    model: Model, machine: Machine, layer: int, kept: int, curvature: LayerCurvature | None = None
) -> ExpertsTask:
    """Return the task of `kept` neurons in every expert of a layer, for one worker, with the default settings."""
    method = Method(ffn="id", heads="none", correction="same-layer", experts="effects")
    stack = model.family.stack_of(layer)
    plan = dense_plan(model.shape, method).with_sizes(intermediate_size=kept)
    alone, index = replace(machine, workers=ALONE, experts_together=None), stack.index_of("ffn")
    return ExpertsTask(
        *(method, model.shape, plan, None, alone, stack, layer, index), seed=0, curvature=curvature, has_dense=False
    )


class MixtureSums:
    """Sum what a layer's experts are profiled from while the text moves through it.

    Args:
        task: of any width below the full. tensors: the layer's. probed: the kinds of `PROBED_KINDS` that are measured.
    """

    def __init__(self, task: ExpertsTask, tensors: Tensors, probed: Sequence[str]) -> None:
        assert task.shape.experts is not None
        self._task, self._tensors = task, tensors
        count, device = task.shape.experts.count, task.machine.device
        self._effects = ExpertSums(count, device) if "experts" in probed else None
        self._experts, self._shared, self._norms = None, None, MixtureNorms.of(task.stack, tensors, device)
        if "ffn" in probed:
            self._shared = shared_accumulator(task, None)
            self._experts = ExpertAccumulator(count, task.dense_units, output_size=None, device=device)

    def update_(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """Add a batch of the stream before the experts, and return what they write, `(tokens, D)`."""
        routing = layer.route(self._task.index, x)
        if self._experts is not None:
            scales = None if self._norms is None else self._norms.scales(layer, routing.mixed, routing.written)
            self._experts.update_(routing, scales=scales)
        if self._shared is not None:
            self._shared.update_(layer.shared_neurons(routing.inputs))
        if self._effects is not None:
            add_effects_(self._effects, self._task, self._tensors, layer, routing)
        return routing.written

    def statistics(self, workers: Workers) -> ExpertStatistics | None:
        """Return the sums of all workers from which narrower experts are profiled."""
        if self._experts is None:
            return None
        shared = None if self._shared is None else self._shared.finish(workers)
        return replace(self._experts.finish(workers), shared=shared)

    def effects(self, workers: Workers) -> ExpertSums | None:
        """Return the sums of all workers from which fewer experts are profiled."""
        return None if self._effects is None else self._effects.of_all(workers)


def error_curve(task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics) -> torch.Tensor:
    """Return the relative squared error of the layer's experts with their k best neurons, for every k: `(m + 1,)`.

    It is of the best correction of every expert by itself, as in `Profile.ffn_errors`. The Gram of a rare expert is the
    one that its neurons are chosen by. An expert without tokens adds nothing.
    """
    evidence, seen = evidence_of(task, tensors, statistics), _seen(task)
    total = torch.zeros(task.dense_units + 1, dtype=torch.float64)
    orders = pivots_of_experts(evidence, task.dense_units)
    for one, order, rows in zip(evidence, orders, statistics.num_rows.tolist(), strict=True):
        if rows:
            total += missed_energies(ordered_factor(one.known_gram(), order), seen(one.consumer[:, order]))
    if statistics.shared is not None:
        gram = statistics.shared.gram
        shared = replace(evidence[0], consumer=_shared_down(task, tensors), gram=gram)
        order = weighted_pivots(*shared.neurons(), rank=len(gram))
        of_shared = missed_energies(ordered_factor(gram, order), seen(shared.consumer[:, order]))
        total += of_shared[:: len(gram) // task.dense_units]
    return total / total[0].clamp_min(torch.finfo(total.dtype).tiny)


def narrowed(task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics) -> tuple[Tensors, float]:
    """Return the layer with the kept neurons of every expert, corrected, and its relative squared error."""
    factors = factors_of(task, tensors, MeasuredExperts(statistics, (), torch.Generator()))
    device, seen = task.machine.device, _seen(task)
    norms, downs = MixtureNorms.of(task.stack, tensors, device), tensors[task.mixer.down].to(device)
    if norms is not None and task.curvature is None:
        seen = norms.seen
    energies = [
        predicted_energies(seen(down), seen(weight), columns, statistics.of(expert))
        for expert, (down, weight, columns) in enumerate(zip(downs, factors.weight, factors.kept, strict=True))
    ]
    if factors.shared is not None:
        assert statistics.shared is not None
        down, shared = _shared_down(task, tensors), factors.shared
        energies.append(predicted_energies(seen(down), seen(shared.weight), shared.kept_columns, statistics.shared))
    error, energy = (torch.stack(parts).sum() for parts in zip(*energies, strict=True))
    return fold_experts(task, tensors, factors), relative(error, energy) ** 2


def _seen(task: ExpertsTask) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes float64 weights `(D, n)` whose squared errors count by the layer's curvature, if it has one."""
    if task.curvature is None:
        return torch.Tensor.double
    root = root_of(task.curvature.ffn)
    return lambda weight: root @ weight.double()


def _shared_down(task: ExpertsTask, tensors: Tensors) -> torch.Tensor:
    assert task.stack.shared_expert is not None
    return augmented_weight(tensors, task.stack.shared_expert.down).to(task.machine.device)
