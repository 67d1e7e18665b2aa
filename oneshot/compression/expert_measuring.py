"""One pass over the text that sums the statistics of a group of a mixture's experts."""

from dataclasses import replace

import torch

from oneshot.compression.expert_statistics import ExpertAccumulator, ExpertStatistics, squared_gates
from oneshot.compression.measuring import target_of
from oneshot.compression.mixture_norms import MixtureNorms
from oneshot.compression.shared_expert import shared_accumulator, shrinks_shared
from oneshot.compression.tasks import ExpertsTask
from oneshot.stream import DensePass, Layer, Routing, States
from oneshot.tensors import Tensors


def measure_group(
    task: ExpertsTask,
    group: range,
    tensors: Tensors,
    states: States,
    current: Layer,
    reference: Layer,
    dense: DensePass,
) -> tuple[ExpertStatistics, torch.Tensor | None]:
    """Sum the statistics of the experts with these numbers; also return what the sublayer should add.

    Only the pass for the last group moves the streams. It also sums the statistics of the shared expert, and returns
    what the sublayer should add to the judged batch; passes before return None for it.

    Other arguments, and None after the last pass, as in `measuring.measure`.
    """
    count, hidden, size = tensors[task.mixer.down].shape
    is_last, with_shared = group.stop == count, shrinks_shared(task)
    loses = task.loses_experts and task.method.solves
    output_size = hidden if task.follows_dense or loses else None
    accumulator = ExpertAccumulator(count, size, output_size=output_size, device=task.machine.device, group=group)
    shared = shared_accumulator(task, output_size) if is_last else None
    target, share, norms = None, 1.0, MixtureNorms.of(task.stack, tensors, task.machine.device)
    if loses and task.follows_dense:
        arriving = round(states.num_tokens / task.shape.tokens_per_arrival)
        share = task.residual_weight(size, arriving) / states.dense_share
    for x, dense_state in states.read(again=not is_last):
        routing, lost = current.route(task.index, x), None
        scales = None if norms is None else norms.scales(current, routing.mixed, routing.written)
        if loses:
            whole = reference.sum(task.index, x) - x
            lost = _lacking(task, whole, current, routing, norms)
        if task.follows_dense and dense_state is not None:
            target = target_of(task, x, dense)
            beyond = _lacking(task, target, current, routing, norms)
            lost = beyond if lost is None else lost + share * (beyond - lost)
        accumulator.update_(routing, lost, with_shared=with_shared, scales=scales)
        if shared is not None:
            own = None if lost is None else lost / squared_gates(routing.gates, with_shared=True).to(lost).unsqueeze(1)
            shared.update_(current.shared_neurons(routing.inputs), own)
    if is_last and not task.follows_dense:
        judged, _ = states.read_judged()
        if judged is not None:
            target = reference.sum(task.index, judged) - judged
    workers = task.machine.workers
    statistics = accumulator.finish(workers)
    if shared is not None:
        statistics = replace(statistics, shared=shared.finish(workers))
    return statistics, target if is_last else None


def _lacking(
    task: ExpertsTask, target: torch.Tensor, current: Layer, routing: Routing, norms: MixtureNorms | None
) -> torch.Tensor:
    """Return what the experts' output lacks `(tokens, D)` for the mixture to add a target `(…, D)` to the stream."""
    residual = target.flatten(0, -2) - current.added(task.index, routing.written)
    return current.before_sum(residual) if norms is None else norms.taken_back(residual, routing)
