"""Neurons inside the experts of a mixture: measured, chosen and corrected expert by expert, and folded.

Every expert is a writer of its own: its neurons are columns that its down projection reads, and its rows are weighted
by its gates. All experts of a model keep equally many neurons, because a stock config states one width. The router
stays as it is, and so does a shared expert whose width is its own (`shared_expert`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from oneshot.architecture import cut
from oneshot.compression.correction import Factors, relative
from oneshot.compression.expert_correction import correct_experts, solved_together
from oneshot.compression.expert_measuring import measure_group
from oneshot.compression.expert_statistics import ExpertStatistics
from oneshot.compression.mixture_norms import MixtureNorms
from oneshot.compression.shared_expert import fold_shared, shrinks_shared, solve_shared
from oneshot.compression.statistics import damping_of
from oneshot.compression.tasks import ExpertsTask
from oneshot.machine.memory import release_heap
from oneshot.machine.transfer import as_like
from oneshot.method import Correction
from oneshot.selection import SELECTORS, Evidence
from oneshot.stream import DensePass, Layer, States
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)

NAMED_EXPERTS = 8


@dataclass(frozen=True)
class ExpertFactors:
    """The kept neurons of every expert and the corrected downs that read them; what was solved as in `Factors`.

    Attributes:
        kept: int64 `(E, m')`, ascending for each expert. weight: `(E, D, m')` in the dtype of the dense one.
        energies: float64 `(E, 2)`, of every expert's error and output; None without statistics.
        shared: factors of the shared expert if it shrinks with the others; else None.
    """

    kept: torch.Tensor
    weight: torch.Tensor
    energies: torch.Tensor | None = None
    condition_number: float | None = None
    max_interpolation: float | None = None
    eigenvalue_fallback: bool = False
    damping: float | None = None
    shared: Factors | None = None

    @property
    def predicted_error(self) -> float | None:
        """Return the error of the routed experts, as if the errors of different ones were orthogonal."""
        return None if self.energies is None else relative(*self.energies.sum(0))


@dataclass(frozen=True)
class MeasuredExperts:
    """State what is known of the experts before the last group of them is solved.

    Attributes:
        statistics: of the last group. solved: factors of the groups before it, whose statistics are gone.
        generator: of random choices, which go on from group to group.
    """

    statistics: ExpertStatistics
    solved: tuple[ExpertFactors, ...]
    generator: torch.Generator


def measure_experts(
    task: ExpertsTask, tensors: Tensors, states: States, current: Layer, reference: Layer, dense: DensePass
) -> tuple[MeasuredExperts, torch.Tensor | None]:
    """Sum the statistics of every expert; also return what the sublayer should add to the judged batch.

    If memory does not hold the statistics of all experts, every group of them (`ExpertsTask.groups`) has a pass of its
    own and is solved after it. The result has the same bytes on a CPU; a device, which takes several experts at once,
    rounds otherwise.

    Arguments and None as in `measuring.measure`.
    """
    generator, solved = _generator(task), list[ExpertFactors]()
    *before, last = task.groups
    for group in before:
        statistics, _ = measure_group(task, group, tensors, states, current, reference, dense)
        solved.append(solve_group(task, tensors, statistics, generator))
        del statistics
        release_heap()
    statistics, target = measure_group(task, last, tensors, states, current, reference, dense)
    return MeasuredExperts(statistics, tuple(solved), generator), target


def solve_experts(
    task: ExpertsTask, tensors: Tensors, measured: MeasuredExperts | None
) -> tuple[torch.Tensor, ExpertFactors, None]:
    """Return the kept neurons `(E, m')` and the factors; one worker solves, for all.

    `measured` is None for a choice by weights alone.
    """
    statistics = None if measured is None else measured.statistics
    if statistics is not None and task.method.correction != "none":
        _warn_of_rare(task, statistics)
    before, generator = ((), _generator(task)) if measured is None else (measured.solved, measured.generator)
    factors = joined((*before, solve_group(task, tensors, statistics, generator)))
    if shrinks_shared(task):
        of_shared = None if statistics is None else statistics.shared
        factors = replace(factors, shared=solve_shared(task, tensors, of_shared))
    return factors.kept, factors, None


def fold_experts(task: ExpertsTask, tensors: Tensors, factors: ExpertFactors) -> Tensors:
    """Return the layer whose experts have the kept neurons and the corrected downs."""
    down = task.mixer.down
    others = {name: tensor for name, tensor in tensors.items() if name != down}
    folded = tensors | cut(others, task.mixer.axes(task.shape), {"neurons": factors.kept})
    folded[down] = factors.weight.to(tensors[down].device)
    return folded if factors.shared is None else fold_shared(task, folded, factors.shared)


def _generator(task: ExpertsTask) -> torch.Generator:
    return torch.Generator().manual_seed(task.seed + task.layer)


def solve_group(
    task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics | None, generator: torch.Generator
) -> ExpertFactors:
    """Return the factors of the experts that the statistics are of, or of all without any."""
    down = tensors[task.mixer.down]
    group = range(len(down)) if statistics is None else statistics.group

    def solution() -> ExpertFactors:
        dampings = _dampings(task, statistics, len(down))
        kept = torch.arange(task.dense_units, device=task.machine.device).repeat(len(group), 1)
        if task.is_reduced:
            evidence = _evidence(task, tensors, group, statistics, dampings, generator)
            kept = SELECTORS[task.selector].neurons_of_experts(evidence, task.kept_units)
        return _corrected(task, down, group, kept, statistics, dampings)

    return task.shared(solution)


def joined(groups: Sequence[ExpertFactors]) -> ExpertFactors:
    """Return the factors of all experts from those of groups in their order, without a shared expert's."""
    if len(groups) == 1:
        return groups[0]
    return ExpertFactors(
        torch.cat([one.kept for one in groups]),
        torch.cat([one.weight for one in groups]),
        torch.cat([one.energies for one in groups if one.energies is not None]),
        *_worst(groups),
    )


def _worst(found: Sequence[Factors | ExpertFactors]) -> tuple[float | None, float | None, bool, float | None]:
    """Return the largest condition number and interpolation, whether any fell back, and the largest damping."""
    solved = [one for one in found if one.condition_number is not None]
    return (
        max((one.condition_number or 0 for one in solved), default=None),
        max((one.max_interpolation or 0 for one in solved), default=None),
        any(one.eigenvalue_fallback for one in solved),
        max((one.damping or 0 for one in solved), default=None),
    )


def _dampings(task: ExpertsTask, statistics: ExpertStatistics | None, count: int) -> list[float]:
    """Return the ridge of every expert."""
    asked = task.method.expert_damping
    if statistics is None:
        return [asked] * count
    return [damping_of(asked, task.dense_units, rows) for rows in statistics.num_rows.tolist()]


def evidence_of(task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics) -> list[Evidence]:
    """Return the evidence of every expert of a group, as neurons are chosen by."""
    dampings = _dampings(task, statistics, len(tensors[task.mixer.down]))
    return _evidence(task, tensors, statistics.group, statistics, dampings, _generator(task))


def _evidence(
    task: ExpertsTask,
    tensors: Tensors,
    group: range,
    statistics: ExpertStatistics | None,
    dampings: list[float],
    generator: torch.Generator,
) -> list[Evidence]:
    """Return the evidence of every expert of a group.

    The Gram of a rare expert shrinks towards a multiple of the identity, so that an expert without tokens keeps the
    neurons with the largest outputs per unit of activation.
    """
    mixer, device = task.mixer, task.machine.device
    down, gate_up = tensors[mixer.down].to(device), tensors[mixer.gate_up].to(device)
    curvature, norms = None, None
    if task.curvature is None:
        norms = MixtureNorms.of(task.stack, tensors, device)
    else:
        curvature = task.curvature.ffn  # of the output before norms
    return [
        Evidence(
            consumer=down[expert] if norms is None else norms.seen(down[expert]),
            producer_energy=_row_energy(gate_up[expert]) if task.needs("producers") else None,
            gram=None
            if statistics is None
            else _shrunk(statistics.of(expert).gram, dampings[expert] - task.method.expert_damping),
            generator=generator,
            pivoting=task.method.pivoting,
            group_size=task.method.pivot_group_size,
            pivot_weights=task.method.pivot_weights,
            curvature=curvature,
        )
        for expert in group
    ]


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
    group: range,
    kept: torch.Tensor,
    statistics: ExpertStatistics | None,
    dampings: list[float],
) -> ExpertFactors:
    """Return the downs over the kept neurons of a group's experts, each corrected by the tokens of its expert."""
    size, hidden, device = task.dense_units, down.shape[1], task.machine.device
    weight = down.new_empty(len(kept), hidden, task.kept_units)
    if statistics is None:
        for place, columns in enumerate(kept):
            weight[place] = as_like(down[place].to(device)[:, columns], weight)
        return ExpertFactors(kept, weight)
    together, found = solved_together(size, hidden, device), list[Factors]()
    energies = torch.zeros(len(kept), 2, dtype=torch.float64, device=device)
    kinds = [_correction(task, statistics, expert) for expert in group]
    for kind in dict.fromkeys(kinds):
        places = [place for place, own in enumerate(kinds) if own == kind]
        for first in range(0, len(places), together):
            own = places[first : first + together]
            experts = [group[place] for place in own]
            solved = correct_experts(
                torch.stack([down[expert] for expert in experts]).to(device),
                torch.stack([kept[place] for place in own]),
                statistics,
                experts,
                correction=kind,
                dampings=[dampings[expert] for expert in experts],
                residual_weights=[_residual_weight(task, statistics, expert) for expert in experts],
            )
            for place, one in zip(own, solved, strict=True):
                weight[place] = as_like(one.weight, weight)
                if one.energies is not None:
                    energies[place] = one.energies
                found.append(replace(one, weight=one.weight.new_empty(0)))  # the corrected weight is copied
    return ExpertFactors(kept, weight, energies, *_worst(found))


def _correction(task: ExpertsTask, statistics: ExpertStatistics, expert: int) -> Correction:
    """Return how an expert is corrected: not if it saw fewer tokens than it has neurons."""
    if int(statistics.num_rows[expert]) < task.dense_units:
        return "none"
    if not task.method.solves:
        return task.method.correction
    two_streams = task.loses_experts or task.method.correction == "two-stream"  # or of the layer's own residual
    has_target = statistics.residuals is not None and int(statistics.num_targets[expert]) > 0
    return "two-stream" if two_streams and has_target else "same-layer"


def _residual_weight(task: ExpertsTask, statistics: ExpertStatistics, expert: int) -> float:
    return 1.0 if task.loses_experts else task.residual_weight(task.dense_units, int(statistics.num_targets[expert]))


def _warn_of_rare(task: ExpertsTask, statistics: ExpertStatistics) -> None:
    """Warn of experts that saw too few tokens to be corrected, by their numbers in the result."""
    rare = [expert for expert, rows in enumerate(statistics.num_rows.tolist()) if rows < task.dense_units]
    if not rare:
        return
    named = ", ".join(map(str, rare[:NAMED_EXPERTS])) + (", …" if len(rare) > NAMED_EXPERTS else "")
    logger.warning(
        "Layer %d: %d of %d experts (%s) saw fewer calibration tokens than their %d neurons, so they are not "
        "corrected; give more --num-sequences.",
        task.number,
        len(rare),
        len(statistics.num_rows),
        named,
        task.dense_units,
    )
