"""The expert that every token passes, where its width is a multiple of the routed experts' and shrinks with theirs.

It is compressed like a dense FFN, by a `FeedForwardTask` with the shared expert's sizes.
"""

from dataclasses import fields, replace

from oneshot.compression.correction import Factors
from oneshot.compression.fold import fold_sublayer
from oneshot.compression.solving import solve
from oneshot.compression.statistics import GramAccumulator, Statistics
from oneshot.compression.tasks import ExpertsTask, FeedForwardTask
from oneshot.tensors import Tensors


def shrinks_shared(task: ExpertsTask) -> bool:
    """Return whether the shared expert loses neurons with the routed ones."""
    experts = task.shape.experts
    return task.is_reduced and experts is not None and experts.shared_count > 0


def shared_accumulator(task: ExpertsTask, output_size: int | None) -> GramAccumulator | None:
    """Return the sums of what the shared expert's down reads; None if the expert stays."""
    experts = task.shape.experts
    if not shrinks_shared(task) or experts is None:
        return None
    return GramAccumulator(experts.shared(task.dense_units), output_size=output_size, device=task.machine.device)


def solve_shared(task: ExpertsTask, tensors: Tensors, statistics: Statistics | None) -> Factors:
    """Return the kept neurons of the shared expert and its corrected down."""
    _, factors, _ = solve(_own_task(task), tensors, statistics)
    return factors


def fold_shared(task: ExpertsTask, tensors: Tensors, factors: Factors) -> Tensors:
    """Return the layer whose shared expert has the kept neurons and the corrected down."""
    own = _own_task(task)
    return fold_sublayer(tensors, own.sublayer, own.shape, factors)


def _own_task(task: ExpertsTask) -> FeedForwardTask:
    """Return the task of the shared expert as the one FFN of a layer."""
    shared, experts, method = task.stack.shared_expert, task.shape.experts, task.method
    assert shared is not None
    assert experts is not None
    shape = replace(task.shape, experts=None, intermediate_size=experts.shared(task.dense_units))
    plan = task.plan.with_sizes(intermediate_size=experts.shared(task.kept_units))
    method = replace(method, damping=method.expert_damping, residual_weight=method.expert_residual_weight)
    has_dense = task.has_dense
    if task.loses_experts and method.solves:  # what is lost of the layer itself counts in full
        method, has_dense = replace(method, correction="two-stream", residual_weight=1.0), True
    own = {field.name: getattr(task, field.name) for field in fields(task)}
    changed = {"stack": task.stack.with_ffn(shared), "shape": shape, "plan": plan, "method": method}
    return FeedForwardTask(**own | changed | {"has_dense": has_dense})
