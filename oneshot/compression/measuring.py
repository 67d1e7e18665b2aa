"""Statistics of the activations that a sublayer's writer reads, and what the sublayer should add to the stream."""

import logging
from dataclasses import replace

import torch

from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.fold import augmented_weight
from oneshot.compression.statistics import (
    GramAccumulator,
    HeadGramAccumulator,
    MomentAccumulator,
    SketchAccumulator,
    SplitAccumulator,
    Statistics,
    with_constant_column,
)
from oneshot.compression.sublayer import SublayerTask
from oneshot.stream import DensePass, Layer, States
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)

NONZEROS = {"count": 1, "sparse-sign": 8}  # per column of the sketching matrix


def measure(
    task: SublayerTask, tensors: Tensors, states: States, current: Layer, reference: Layer, dense: DensePass
) -> tuple[Statistics, torch.Tensor | None]:
    """Sum the statistics of what the writer reads; also return what the sublayer should add to the judged batch.

    None if this worker has no batch of the stream that makes the target.

    Args:
        current: the layer that the compressed stream passes. reference: the layer before any reduction, which
            makes the target if the dense stream does not. dense: the dense stream's deferred pass.
    """
    weight = augmented_weight(tensors, task.sublayer.writer)
    has_bias = weight.shape[1] > task.num_columns
    accumulator = _accumulator(task, weight, states)
    sketch, moments = _sketch(task, states), None
    if task.needs("moments"):
        moments = MomentAccumulator(task.num_columns, device=task.machine.device)
    values = _value_accumulator(task)
    target, branch_norm = None, BranchNorm.of(task.sublayer, tensors, task.machine.device)
    for x, dense_state in states.read():
        inner, lost = current.inner(task.index, x), None
        written = current.write(task.index, inner) if task.follows_dense or branch_norm is not None else inner
        if task.follows_dense and dense_state is not None:
            target = target_of(task, current.base(task.index, x), dense)
            lost = target.flatten(0, -2) - current.added(task.index, written)
            lost = current.before_sum(lost) if branch_norm is None else branch_norm.taken_back(lost, written)
        rows = with_constant_column(inner) if has_bias else inner
        if branch_norm is not None:
            scales = branch_norm.scales(written, current.added(task.index, written))
            rows, inner = rows * scales.to(rows), inner * scales.to(inner)
        accumulator.update_(rows, lost)
        if sketch is not None:
            sketch.update_(inner)
        if moments is not None:
            moments.update_(inner)
        if values is not None:
            values.update_(current.values(task.index, x))
    if not task.follows_dense:
        judged, _ = states.read_judged()
        if judged is not None:
            target = reference.sum(task.index, judged) - reference.base(task.index, judged)
    workers = task.machine.workers
    statistics = replace(
        _reachable(task, accumulator.finish(workers)),
        sketch=None if sketch is None else sketch.finish(workers),
        moments=None if moments is None else moments.finish(workers),
        value_grams=None if values is None else values.finish(workers),
    )
    _warn_if_dead(task, statistics.gram)
    return statistics, target


def target_of(task: SublayerTask, x: torch.Tensor, dense: DensePass) -> torch.Tensor:
    """Return what the sublayer should add to `x`, a batch of the compressed stream.

    It leads to the dense stream after the sublayer, and so also corrects what earlier sublayers lost. With
    `residual_target="sublayer"` it is what the dense sublayer adds to its own input (STAT section 3.1).
    """
    return dense.sum - (x if task.method.residual_target == "stream" else dense.before)


def _accumulator(task: SublayerTask, weight: torch.Tensor, states: States) -> GramAccumulator | SplitAccumulator:
    """Return the sums of what a writer `weight (d, n)` reads."""
    device, (output_size, size) = task.machine.device, weight.shape
    target_size = output_size if task.follows_dense else None
    if task.method.holds_out:
        return SplitAccumulator(size, output_size=target_size, device=device, first_batch=states.first_batch)
    return GramAccumulator(size, output_size=target_size, device=device)


def _sketch(task: SublayerTask, states: States) -> SketchAccumulator | None:
    if not task.takes_sketch or task.method.sketch == "none":
        return None
    return SketchAccumulator(
        task.method.rows_of_sketch(task.num_columns),
        task.num_columns,
        nonzeros=NONZEROS[task.method.sketch],
        seed=task.seed,
        device=task.machine.device,
        row_offset=states.first_row,
    )


def _value_accumulator(task: SublayerTask) -> HeadGramAccumulator | None:
    """Return the sums of the values themselves, if their subspaces come from them."""
    if task.smaller_values is None or task.method.value_features == "heads":
        return None
    return HeadGramAccumulator(task.shape.num_key_value_heads, task.shape.head_dim, device=task.machine.device)


def _reachable(task: SublayerTask, statistics: Statistics) -> Statistics:
    """Return the residual within the subspace that the sublayer writes to; its energy also counts the rest."""
    if task.subspaces is None or task.stack.norms_after or statistics.residual is None:
        return statistics
    inside = task.subspaces.inside(statistics.residual, task.position + 1)
    held_out = None if statistics.held_out is None else _reachable(task, statistics.held_out)
    return replace(statistics, residual=inside, held_out=held_out)


def _warn_if_dead(task: SublayerTask, gram: torch.Tensor) -> None:
    """Warn if more columns are zero on the whole text than are removed, because the rest is an arbitrary choice."""
    diagonal = gram.diagonal()[: task.num_columns]
    kept_columns = task.kept_units * task.num_columns // task.dense_units
    dead, removed = int((diagonal == 0).sum()), task.num_columns - kept_columns
    if dead > removed:
        logger.warning(
            "Layer %d, %s: %d of %d columns are zero on the whole calibration text, more than the %d removed.",
            task.number,
            task.sublayer.kind,
            dead,
            task.num_columns,
            removed,
        )


def relative_error(target: torch.Tensor, reached: torch.Tensor) -> float:
    """Return `‖target − reached‖ / ‖target‖`."""
    energy = target.double().norm().clamp_min(torch.finfo(torch.float64).tiny)  # a sublayer may output zeros
    return float((target - reached).double().norm() / energy)
