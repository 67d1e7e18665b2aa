"""Least-squares corrections of the downs of experts, each by the statistics of its own tokens.

A device solves several at once, because one is too small to fill it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from oneshot_kernels import columns_without

from oneshot.compression.correction import Factors, correct, predicted_energies, relative
from oneshot.compression.expert_statistics import ExpertStatistics
from oneshot.compression.statistics import Statistics
from oneshot.compression.sublayer import SublayerTask
from oneshot.linalg.psd import cholesky_together, condition_numbers, solve_with
from oneshot.machine.transfer import as_like
from oneshot.method import Correction

MOST_TOGETHER = 8
MOST_NUMBERS = 2**26  # in the downs of those that are solved at once


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


def joined(found: Sequence[ExpertFactors | Factors]) -> ExpertFactors:
    """Join the factors of groups of experts, in their order; a shared expert's are among them or the last group's."""
    groups = [one for one in found if isinstance(one, ExpertFactors)]
    shared = next((one for one in found if isinstance(one, Factors)), groups[-1].shared)
    if len(groups) == 1:
        return replace(groups[0], shared=shared)
    energies = [one.energies for one in groups if one.energies is not None]
    return ExpertFactors(
        torch.cat([one.kept for one in groups]),
        torch.cat([one.weight for one in groups]),
        torch.cat(energies) if energies else None,
        *_worst(groups),
        shared=shared,
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


def solved_together(size: int, output_size: int, device: torch.device) -> int:
    """Return how many experts with downs `(output_size, size)` are solved at once."""
    return 1 if device.type == "cpu" else max(1, min(MOST_TOGETHER, MOST_NUMBERS // (size * output_size)))


def correct_group(
    task: SublayerTask,
    down: torch.Tensor,
    group: range,
    kept: torch.Tensor,
    statistics: ExpertStatistics | None,
    dampings: Sequence[float],
) -> ExpertFactors:
    """Return the downs over the kept neurons of a group's experts, each corrected by the tokens of its expert.

    Args:
        down: `(E, D, m)` of all experts. kept: int64 `(n, m')` of the group's. statistics: of the group or of a larger
            one; None: of none. dampings: the ridge of all experts.
    """
    size, hidden, device = task.dense_units, down.shape[1], task.machine.device
    weight = down.new_empty(len(kept), hidden, task.kept_units)
    if statistics is None:
        for place, columns in enumerate(kept):
            weight[place] = as_like(down[group[place]].to(device)[:, columns], weight)
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


def _correction(task: SublayerTask, statistics: ExpertStatistics, expert: int) -> Correction:
    """Return how an expert is corrected: not without a token.

    One with fewer tokens than neurons is corrected towards the layer's own output alone, by a ridge that grows as its
    tokens get fewer (benchmarks/records/experiments.md); without a ridge it is not.
    """
    rows, solves = int(statistics.num_rows[expert]), task.method.solves
    is_rare = rows < task.dense_units
    if not rows or (is_rare and not (solves and task.method.expert_damping)):
        return "none"
    if not solves:
        return task.method.correction
    if is_rare:
        return "same-layer"
    two_streams = task.loses_experts or task.method.correction == "two-stream"  # or of the layer's own residual
    has_target = statistics.residuals is not None and int(statistics.num_targets[expert]) > 0
    return "two-stream" if two_streams and has_target else "same-layer"


def _residual_weight(task: SublayerTask, statistics: ExpertStatistics, expert: int) -> float:
    if task.loses_experts:
        return 1.0
    return task.residual_weight(task.dense_units, int(statistics.num_targets[expert]))


def correct_experts(
    downs: torch.Tensor,
    kept: torch.Tensor,
    statistics: ExpertStatistics,
    experts: Sequence[int],
    *,
    correction: Correction,
    dampings: Sequence[float],
    residual_weights: Sequence[float],
) -> list[Factors]:
    """Return the downs of experts over their kept neurons, as `correct` returns one.

    Args:
        downs: `(b, D, m)` of these experts. kept: int64 `(b, m')`. statistics: of a group that has them.
        correction, dampings, residual_weights: as in `correct`, of each.
    """
    if len(experts) > 1 and correction in ("same-layer", "two-stream"):
        weights = torch.tensor(residual_weights, dtype=torch.float64) * (correction == "two-stream")
        found = _solved(downs, kept, statistics, experts, torch.tensor(dampings, dtype=torch.float64), weights)
        if found is not None:
            return found
    return [
        correct(down, columns, statistics.of(expert), correction=correction, damping=damping, residual_weight=weight)
        for down, columns, expert, damping, weight in zip(downs, kept, experts, dampings, residual_weights, strict=True)
    ]


def _solved(
    downs: torch.Tensor,
    kept: torch.Tensor,
    statistics: ExpertStatistics,
    experts: Sequence[int],
    dampings: torch.Tensor,
    residual_weights: torch.Tensor,
) -> list[Factors] | None:
    """Solve several at once; None if the Gram of one needs a larger ridge, which `correct` finds."""
    places = torch.tensor([statistics.group.index(expert) for expert in experts]).to(kept.device)
    at, rows = places.view(-1, 1, 1), kept.unsqueeze(2)
    rest = columns_without(kept, downs.shape[2])
    factors = cholesky_together(statistics.grams[at, rows, kept.unsqueeze(1)], dampings.to(kept.device))
    if factors is None:
        return None
    coefficients = solve_with(factors, statistics.grams[at, rows, rest.unsqueeze(1)].double())
    dense = downs.double()
    weights = _columns(dense, kept).baddbmm_(_columns(dense, rest), coefficients.mT)
    if statistics.residuals is not None and residual_weights.any():
        steps = solve_with(factors, statistics.residuals[places.unsqueeze(1), kept].double())
        weights += residual_weights.to(kept.device).view(-1, 1, 1) * steps.mT
        del steps
    conditions = condition_numbers(factors, "kept columns")
    del factors
    residuals, residual_energies = statistics.residuals, statistics.residual_energies[places]
    residuals = None if residuals is None else residuals[places]
    together = Statistics(statistics.grams[places], residuals, residual_energies, num_rows=0)  # which no energy needs
    energies = torch.stack(predicted_energies(dense, weights, kept, together), dim=1)
    largest = coefficients.abs().amax((1, 2)) if coefficients.numel() else torch.zeros(len(kept))
    return [
        Factors(columns, weight, None, condition, coefficient, damping=damping, energies=own)
        for columns, weight, own, condition, coefficient, damping in zip(
            kept, weights, energies, conditions, largest.tolist(), dampings.tolist(), strict=True
        )
    ]


def _columns(matrices: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return columns `(b, k)` of `matrices (b, D, m)`."""
    return matrices.gather(2, columns.unsqueeze(1).expand(-1, matrices.shape[1], -1))
