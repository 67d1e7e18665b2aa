"""The ways through a sublayer, by its mixer: one writer over all tokens, or one for each expert of a mixture."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from oneshot.compression.experts import fold_experts, measure_experts, solve_experts
from oneshot.compression.fold import fold_sublayer
from oneshot.compression.measuring import measure
from oneshot.compression.solving import solve
from oneshot.compression.sublayer import SublayerTask
from oneshot.families import Experts
from oneshot.stream import DensePass, Layer, States
from oneshot.tensors import Tensors


@dataclass(frozen=True)
class Way:
    """Measure what writers read, choose columns and correct the writers, and fold both into smaller tensors.

    Attributes:
        measure: `(task, tensors, states, current, reference, dense) -> (statistics, target)`, see `measuring.measure`.
        solve: `(task, tensors, statistics) -> (units, factors, values)`, see `solving.solve`.
        fold: `(task, tensors, factors) -> tensors`.
    """

    measure: Callable[[SublayerTask, Tensors, States, Layer, Layer, DensePass], tuple[Any, torch.Tensor | None]]
    solve: Callable[[SublayerTask, Tensors, Any], tuple[torch.Tensor, Any, torch.Tensor | None]]
    fold: Callable[[SublayerTask, Tensors, Any], Tensors]


ONE_WRITER = Way(measure, solve, lambda task, tensors, found: fold_sublayer(tensors, task.sublayer, task.shape, found))
MIXTURE = Way(measure_experts, solve_experts, fold_experts)


def way_of(task: SublayerTask) -> Way:
    """Return the way through the sublayer of a task."""
    return MIXTURE if isinstance(task.sublayer.mixer, Experts) else ONE_WRITER
