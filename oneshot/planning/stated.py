"""Sizes that a target states: checked, and as a plan that keeps everything else."""

import math
from dataclasses import replace
from typing import Any

from oneshot.architecture import ModelShape
from oneshot.config import Target
from oneshot.errors import ConfigError, PlanError
from oneshot.method import Method
from oneshot.planning.budget import default_round_to
from oneshot.planning.grid import Grid
from oneshot.planning.plan import Plan, dense_plan


def with_steps(target: Target, shape: ModelShape, step: int) -> Target:
    """Return the target whose sizes are multiples of a step, and of which every GPU that serves it has whole groups."""
    serving = target.serving
    step = math.lcm(step, serving.tp * serving.group)
    if step == 1:
        return target
    otherwise = 1 if serving.group > 1 else default_round_to(shape.hidden_size)
    return replace(target, round_to=math.lcm(step, target.round_to or otherwise, shape.width_step))


def with_sizes(target: Target, grid: Grid) -> Target:
    """Return the target with the sizes of its rates above 0, rounded to the nearest; rotary pairs stay whole."""
    shape = grid.shape
    sizes: dict[str, Any] = {}
    if target.hidden_rate:
        sizes |= {"hidden_size": max(1, round(shape.hidden_size * (1 - target.hidden_rate))), "hidden_rate": None}
    if target.inner_rate:
        kept, pair = 1 - target.inner_rate, 2 if grid.family.stack.rotary else 1
        sizes |= {"intermediate_size": max(1, round(shape.intermediate_size * kept)), "inner_rate": None}
        inner = {
            "value_size": max(1, round(shape.head_dim * kept)),
            "query_key_size": max(1, round(shape.head_dim * kept / pair)) * pair,
        }
        sizes |= {name: size for name, size in inner.items() if size < shape.head_dim}  # the nearest may be the whole
    return replace(target, **sizes)


def stated_plan(grid: Grid, method: Method, target: Target) -> Plan:
    """Return the plan that keeps everything, but for the sizes inside sublayers that the target states.

    Raises `ConfigError` for sizes that contradict the method, `PlanError` for those that are out of reach.
    """
    _check_inner_sizes(grid, method, target)
    plan = dense_plan(grid.shape, method, target.query_key_size, target.value_size)
    if target.intermediate_size is not None:
        _check_width(grid.shape, target.intermediate_size)
        plan = plan.with_width(target.intermediate_size)
    if target.num_experts is not None:
        _check_experts(grid, method, target.num_experts)
        plan = plan.with_sizes(num_experts=target.num_experts)
    return plan


def _check_width(shape: ModelShape, width: int) -> None:
    if width > shape.intermediate_size:
        raise PlanError(
            f"--set intermediate_size={width} is above the model's {shape.intermediate_size}; give at most that."
        )
    if width % shape.width_step:
        raise PlanError(
            f"--set intermediate_size={width} is not a multiple of {shape.width_step}, as its FFN widths are."
        )


def _check_inner_sizes(grid: Grid, method: Method, target: Target) -> None:
    for name, size in (("value_size", target.value_size), ("query_key_size", target.query_key_size)):
        if size is not None and size >= grid.shape.head_dim:
            raise PlanError(f"--set {name}={size} is not below the model's {grid.shape.head_dim}; give a smaller one.")
    if target.query_key_size is not None and target.query_key_size % 2 and grid.family.stack.rotary:
        raise PlanError(f"--set query_key_size={target.query_key_size} is odd; rotary pairs need an even one.")
    if method.plans_inner_sizes and (target.query_key_size or target.value_size):
        raise ConfigError("Give either --set inner_sizes=sensitivity or the sizes: query_key_size=, value_size=.")


def _check_experts(grid: Grid, method: Method, stated: int) -> None:
    experts = grid.shape.experts
    assert experts is not None, "`Grid.settle` refuses a stated number without a selector of experts"
    if not experts.per_token <= stated <= experts.count:
        raise PlanError(
            f"--set num_experts={stated} is not between the {experts.per_token} experts of a token and the model's "
            f"{experts.count}."
        )
    if method.plans_experts:
        raise ConfigError(
            f"--set num_experts={stated} is for all layers, and expert_counts=sensitivity gives each its own; "
            "leave one out."
        )
