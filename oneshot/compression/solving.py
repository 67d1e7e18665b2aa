"""The units of a sublayer that stay, and its writer corrected over their columns."""

from dataclasses import replace

import torch

from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.correction import Factors, best_damping, correct, correct_heads, predicted_error
from oneshot.compression.fold import augmented_weight
from oneshot.compression.inner_heads import value_subspaces
from oneshot.compression.statistics import Statistics
from oneshot.compression.tasks import OneWriterTask
from oneshot.selection import Evidence
from oneshot.tensors import Tensors


def solve(
    task: OneWriterTask, tensors: Tensors, statistics: Statistics | None
) -> tuple[torch.Tensor, Factors, torch.Tensor | None]:
    """Return the kept units, the factors, and the values' subspaces if they shrink; one worker solves, for all.

    `statistics` are None for a choice by weights alone.
    """

    def solution() -> tuple[torch.Tensor, Factors, torch.Tensor | None]:
        weight = augmented_weight(tensors, task.sublayer.writer).to(task.machine.device)
        branch_norm = BranchNorm.of(task.sublayer, tensors, task.machine.device)
        if branch_norm is not None:
            weight = branch_norm.seen(weight)
        units, columns = _select(task, tensors, weight, statistics, branch_norm)
        factors = _correct(task, weight, columns, statistics)
        if branch_norm is not None:
            factors = replace(factors, weight=branch_norm.unseen(factors.weight))
        if task.smaller_values is None:
            return units, factors, None
        assert statistics is not None
        return units, *_reduce_values(task, weight, units, columns, factors, statistics, task.smaller_values)

    return task.shared(solution)


def _select(
    task: OneWriterTask,
    tensors: Tensors,
    weight: torch.Tensor,
    statistics: Statistics | None,
    branch_norm: BranchNorm | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the units that stay, ascending, and their columns; `weight`: as the norm lets the stream see it."""
    units = torch.arange(task.dense_units, device=task.machine.device)
    if task.is_reduced and task.shared_heads is not None:
        units = task.shared_heads
    elif task.is_reduced:
        generator = torch.Generator().manual_seed(task.seed + task.layer)
        curvature = task.neuron_curvature
        if curvature is not None and branch_norm is not None:
            curvature = branch_norm.curvature_of_seen(curvature)
        evidence = Evidence(
            consumer=weight[:, : task.num_columns],
            producer_energy=task.producer_energy(tensors).to(task.machine.device) if task.needs("producers") else None,
            gram=None if statistics is None else statistics.gram[: task.num_columns, : task.num_columns],
            generator=generator,
            moments=None if statistics is None else statistics.moments,
            sketch=None if statistics is None else statistics.sketch,
            pivoting=task.method.pivoting,
            group_size=task.method.pivot_group_size,
            pivot_weights=task.method.pivot_weights,
            curvature=curvature,
        )
        units = task.choose(evidence)
    return units, task.columns_of(units)


def _correct(
    task: OneWriterTask, weight: torch.Tensor, columns: torch.Tensor, statistics: Statistics | None
) -> Factors:
    """Correct the writer over the kept columns; its bias is a last column that stays."""
    has_bias = weight.shape[1] > task.num_columns
    if has_bias:
        columns = torch.cat((columns, columns.new_tensor([weight.shape[1] - 1])))
    if task.corrects_whole_heads:
        assert statistics is not None
        return correct_heads(
            weight, columns, statistics, head_dim=task.shape.head_dim, damping=task.method.fixed_damping
        )
    correction = task.method.correction
    if correction == "two-stream" and not task.follows_dense:
        correction = "same-layer"
    if correction == "bias" and not has_bias:
        correction = "none"
    share = task.residual_weight(weight.shape[1], 0 if statistics is None else statistics.num_targets)
    if statistics is None:
        damping = task.method.fixed_damping
    elif statistics.held_out is None:
        damping = task.damping(weight.shape[1], statistics.num_rows)
    else:
        damping = best_damping(weight, columns, statistics, correction=correction, residual_weight=share)
    return correct(weight, columns, statistics, correction=correction, damping=damping, residual_weight=share)


def _reduce_values(
    task: OneWriterTask,
    weight: torch.Tensor,
    heads: torch.Tensor,
    columns: torch.Tensor,
    factors: Factors,
    statistics: Statistics,
    size: int,
) -> tuple[Factors, torch.Tensor]:
    """Return the factors of a writer that reads values in subspaces of `size` coordinates, and the subspaces."""
    grams = statistics.value_grams
    if grams is not None:
        grams = grams[(heads // task.shape.heads_per_group).unique()]
    values, restricted = value_subspaces(
        factors.weight[:, : len(columns)],
        statistics.gram[columns.unsqueeze(1), columns],
        num_groups=task.kept.num_key_value_heads,
        head_dim=task.shape.head_dim,
        size=size,
        value_grams=grams,
        weighted=task.method.value_weights == "output",
        correct=task.method.solves,
        damping=task.method.fixed_damping,
    )
    new_weight = torch.cat((restricted, factors.weight[:, len(columns) :]), dim=1)
    error = predicted_error(weight.double(), new_weight, factors.kept_columns, statistics)
    return replace(factors, weight=new_weight, predicted_error=error), values
