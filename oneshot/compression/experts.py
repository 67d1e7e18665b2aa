"""Neurons inside the experts of a mixture: measured in one pass, chosen and corrected expert by expert, and folded.

Every expert is a writer of its own: its neurons are columns that its down projection reads, and its rows are weighted
by its gates. All experts of a model keep equally many neurons, because a stock config states one width. The router
stays as it is, and so does a shared expert whose width is its own (`shared_expert`).
"""

import logging
from dataclasses import dataclass, replace

import torch

from oneshot.compression.correction import Factors, correct, predicted_energies, relative
from oneshot.compression.expert_statistics import ExpertAccumulator, ExpertStatistics, squared_gates
from oneshot.compression.measuring import target_of
from oneshot.compression.shared_expert import fold_shared, shared_accumulator, shrinks_shared, solve_shared
from oneshot.compression.statistics import TOKENS_PER_COLUMN
from oneshot.compression.tasks import ExpertsTask
from oneshot.machine.transfer import as_like
from oneshot.selection import SELECTORS, Evidence
from oneshot.stream import DensePass, Layer, Routing, States
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)

NAMED_EXPERTS = 8


@dataclass(frozen=True)
class ExpertFactors:
    """The kept neurons of every expert and the corrected downs that read them; what was solved as in `Factors`.

    Attributes:
        kept: int64 `(E, m')`, ascending for each expert. weight: `(E, D, m')` in the dtype of the dense one.
        predicted_error: of the routed experts, as if the errors of different ones were orthogonal; None without
            statistics.
        shared: factors of the shared expert if it shrinks with the others; else None.
    """

    kept: torch.Tensor
    weight: torch.Tensor
    predicted_error: float | None = None
    condition_number: float | None = None
    max_interpolation: float | None = None
    eigenvalue_fallback: bool = False
    damping: float | None = None
    shared: Factors | None = None


def measure_experts(
    task: ExpertsTask, tensors: Tensors, states: States, current: Layer, reference: Layer, dense: DensePass
) -> tuple[ExpertStatistics, torch.Tensor | None]:
    """Sum the statistics of every expert; also return what the sublayer should add to the judged batch.

    Arguments and None as in `measuring.measure`.
    """
    count, hidden, size = tensors[task.mixer.down].shape
    output_size = hidden if task.follows_dense or (task.loses_experts and task.method.solves) else None
    accumulator = ExpertAccumulator(count, size, output_size=output_size, device=task.machine.device)
    shared = shared_accumulator(task, output_size)
    target, loses, share = None, task.loses_experts and task.method.solves, 1.0
    if loses and task.follows_dense:
        arriving = round(states.num_tokens / task.shape.tokens_per_arrival)
        share = task.residual_weight(size, arriving) / states.dense_share
    for x, dense_state in states.read():
        routing, lost = current.route(task.index, x), None
        if loses:
            lost = _lost(task, x, reference, current, routing)
        if task.follows_dense and dense_state is not None:
            target = target_of(task, x, dense)
            beyond = current.before_sum(target.flatten(0, -2) - current.added(task.index, routing.written))
            lost = beyond if lost is None else lost + share * (beyond - lost)
        accumulator.update_(routing, lost, with_shared=shared is not None)
        if shared is not None:
            own = None if lost is None else lost / squared_gates(routing.gates, with_shared=True).to(lost).unsqueeze(1)
            shared.update_(current.shared_neurons(routing.inputs), own)
    if not task.follows_dense:
        judged, _ = states.read_judged()
        target = reference.sum(task.index, judged) - judged
    workers = task.machine.workers
    statistics = accumulator.finish(workers)
    return statistics if shared is None else replace(statistics, shared=shared.finish(workers)), target


def _lost(task: ExpertsTask, x: torch.Tensor, reference: Layer, current: Layer, routing: Routing) -> torch.Tensor:
    """Return what the mixture wrote with all its experts beyond what it writes without those that went."""
    whole = reference.sum(task.index, x) - x
    return current.before_sum(whole.flatten(0, -2) - current.added(task.index, routing.written))


def solve_experts(
    task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics | None
) -> tuple[torch.Tensor, ExpertFactors, None]:
    """Return the kept neurons `(E, m')` and the factors; one worker solves, for all.

    `statistics` are None for a choice by weights alone.
    """

    def solution() -> ExpertFactors:
        dampings = _dampings(task, statistics, len(tensors[task.mixer.down]))
        kept = _select(task, tensors, statistics, dampings)
        return _corrected(task, tensors[task.mixer.down], kept, statistics, dampings)

    if statistics is not None and task.method.correction != "none":
        _warn_of_rare(task, statistics)
    factors = task.shared(solution)
    if shrinks_shared(task):
        of_shared = None if statistics is None else statistics.shared
        factors = replace(factors, shared=solve_shared(task, tensors, of_shared))
    return factors.kept, factors, None


def fold_experts(task: ExpertsTask, tensors: Tensors, factors: ExpertFactors) -> Tensors:
    """Return the layer whose experts have the kept neurons and the corrected downs."""
    mixer = task.mixer
    gate_up = tensors[mixer.gate_up]
    count, kept = len(gate_up), factors.kept.to(gate_up.device)
    both = gate_up.unflatten(1, (2, -1))
    numbers = torch.arange(count, device=gate_up.device).view(-1, 1, 1)
    halves = torch.arange(2, device=gate_up.device).view(1, -1, 1)
    cut = both[numbers, halves, kept.unsqueeze(1)].flatten(1, 2)
    folded = tensors | {mixer.gate_up: cut, mixer.down: factors.weight.to(tensors[mixer.down].device)}
    if mixer.alternating:
        biases = tensors[mixer.gate_up_bias].unflatten(1, (2, -1))
        folded[mixer.gate_up_bias] = biases.gather(2, kept.unsqueeze(1).expand(-1, 2, -1)).flatten(1)
    return folded if factors.shared is None else fold_shared(task, folded, factors.shared)


def _dampings(task: ExpertsTask, statistics: ExpertStatistics | None, count: int) -> list[float]:
    """Return the ridge of every expert: it grows as fewer than `TOKENS_PER_COLUMN` tokens come to a neuron."""
    asked = task.method.expert_damping
    if statistics is None:
        return [asked] * count
    enough = TOKENS_PER_COLUMN * task.dense_units
    return [asked * max(1.0, enough / max(1, rows)) for rows in statistics.num_rows.tolist()]


def _select(
    task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics | None, dampings: list[float]
) -> torch.Tensor:
    """Return the neurons that stay, int64 `(E, m')`, ascending.

    The Gram of a rare expert shrinks towards a multiple of the identity, so that an expert without tokens keeps the
    neurons with the largest outputs per unit of activation.
    """
    mixer, device = task.mixer, task.machine.device
    if not task.is_reduced:
        return torch.arange(task.dense_units, device=device).repeat(len(dampings), 1)
    down, gate_up = tensors[mixer.down].to(device), tensors[mixer.gate_up].to(device)
    generator = torch.Generator().manual_seed(task.seed + task.layer)
    evidence = [
        Evidence(
            consumer=down[expert],
            producer_energy=_row_energy(gate_up[expert]) if task.needs("producers") else None,
            gram=None
            if statistics is None
            else _shrunk(statistics.grams[expert], damping - task.method.expert_damping),
            generator=generator,
            pivoting=task.method.pivoting,
            group_size=task.method.pivot_group_size,
            pivot_weights=task.method.pivot_weights,
        )
        for expert, damping in enumerate(dampings)
    ]
    return SELECTORS[task.selector].neurons_of_experts(evidence, task.kept_units)


def _row_energy(gate_up: torch.Tensor) -> torch.Tensor:
    """Return the squared norms `(m,)` of the rows of gate and up that make each neuron, float32."""
    return gate_up.float().square().sum(1).unflatten(0, (2, -1)).sum(0)


def _shrunk(gram: torch.Tensor, by: float) -> torch.Tensor:
    """Return `G + by · mean(diag G) I`, and the identity for a Gram of nothing."""
    mean = gram.diagonal().mean()
    ridge = torch.where(mean > 0, by * mean, 1.0)
    return gram + ridge * torch.eye(len(gram), device=gram.device) if by > 0 else gram


def _corrected(
    task: ExpertsTask,
    down: torch.Tensor,
    kept: torch.Tensor,
    statistics: ExpertStatistics | None,
    dampings: list[float],
) -> ExpertFactors:
    """Return the downs over the kept neurons, each corrected by the tokens of its expert."""
    size, weight = task.dense_units, down.new_empty(len(kept), down.shape[1], task.kept_units)
    found, energies = [], []
    for expert, columns in enumerate(kept):
        own = None if statistics is None else statistics.of(expert)
        correction = task.method.correction
        if correction == "same-layer" and task.loses_experts:
            correction = "two-stream"  # of the layer's own residual
        if own is not None and own.num_rows < size:
            correction = "none"
        if correction == "two-stream" and own is not None and own.residual is None:
            correction = "same-layer"
        dense = down[expert].to(task.machine.device)
        factors = correct(
            dense,
            columns,
            own,
            correction=correction,
            damping=dampings[expert],
            residual_weight=1.0 if task.loses_experts or own is None else task.residual_weight(size, own.num_targets),
        )
        weight[expert] = as_like(factors.weight, weight)
        if own is not None:
            energies.append(torch.stack(predicted_energies(dense.double(), factors.weight, columns, own)))
        found.append(factors)
    solved = [one for one in found if one.condition_number is not None]
    return ExpertFactors(
        kept,
        weight,
        relative(*torch.stack(energies).sum(0)) if energies else None,
        max((one.condition_number or 0 for one in solved), default=None),
        max((one.max_interpolation or 0 for one in solved), default=None),
        any(one.eigenvalue_fallback for one in solved),
        max((one.damping or 0 for one in solved), default=None),
    )


def _warn_of_rare(task: ExpertsTask, statistics: ExpertStatistics) -> None:
    """Warn of experts that saw too few tokens to be corrected, by their numbers in the result."""
    rare = [expert for expert, rows in enumerate(statistics.num_rows.tolist()) if rows < task.dense_units]
    if not rare:
        return
    named = ", ".join(map(str, rare[:NAMED_EXPERTS])) + (", …" if len(rare) > NAMED_EXPERTS else "")
    logger.warning(
        "Layer %d: %d of %d experts (%s) saw fewer calibration tokens than their %d neurons, so they are not "
        "corrected; give more --num-sequences.",
        task.layer,
        len(rare),
        len(statistics.num_rows),
        named,
        task.dense_units,
    )
