"""The ways through a sublayer, by its task: steps before its writer is measured, and one writer or one for each expert.

A carried mixer has none: both streams pass it.

To add a mixer: its names in `families/`, its task in `tasks`, and its entry of `WAYS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from oneshot.compression.correction import Factors
from oneshot.compression.experts import fold_experts, measure_experts, solve_experts
from oneshot.compression.fold import fold_sublayer
from oneshot.compression.measuring import measure
from oneshot.compression.solving import solve
from oneshot.compression.steps import FewerExperts, LowRanks, SmallerScores, Step
from oneshot.compression.sublayer import SublayerTask
from oneshot.compression.tasks import AttentionTask, CarriedTask, ExpertsTask, FeedForwardTask, OneWriterTask
from oneshot.stream import DensePass, Layer, States
from oneshot.tensors import Tensors


@dataclass(frozen=True)
class Way:
    """Measure what writers read, choose columns and correct the writers, and fold both into smaller tensors.

    Attributes:
        steps: passes over the text before, as far as the task needs them.
        measure: `(task, tensors, states, current, reference, dense) -> (statistics, target)`, see `measuring.measure`.
        solve: `(task, tensors, statistics) -> (units, factors, values)`, see `solving.solve`.
        fold: `(task, tensors, factors) -> tensors`.
    """

    steps: tuple[type[Step[Any]], ...]
    measure: Callable[[Any, Tensors, States, Layer, Layer, DensePass], tuple[Any, torch.Tensor | None]]
    solve: Callable[[Any, Tensors, Any], tuple[torch.Tensor, Any, torch.Tensor | None]]
    fold: Callable[[Any, Tensors, Any], Tensors]


def _fold_writer(task: OneWriterTask, tensors: Tensors, factors: Factors) -> Tensors:
    return fold_sublayer(tensors, task.sublayer, task.shape, factors)


WAYS: dict[type[SublayerTask], Way] = {
    AttentionTask: Way((SmallerScores, LowRanks), measure, solve, _fold_writer),
    FeedForwardTask: Way((LowRanks,), measure, solve, _fold_writer),
    ExpertsTask: Way((FewerExperts,), measure_experts, solve_experts, fold_experts),
}


def way_of(task: SublayerTask) -> Way:
    """Return the way through the sublayer of a task."""
    return WAYS[type(task)]


def steps_of(task: SublayerTask) -> list[Step[Any]]:
    """Return the steps that a task needs before its writer is measured, in their order."""
    if isinstance(task, CarriedTask):
        return []
    return [step for kind in way_of(task).steps if (step := kind(task)).is_needed]
