"""All kinds of sizes for one target, within what the form can state."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from oneshot.architecture import RANKED_KINDS, ModelShape, RankedKind, StackShape
from oneshot.config import Target
from oneshot.errors import ConfigError, PlanError
from oneshot.method import Method
from oneshot.planning.budget import Budget, OutOfReachError, default_round_to
from oneshot.planning.curves import Profile
from oneshot.planning.damages import Damages, even_damages, predicted_damage, profiled_damages
from oneshot.planning.depth import with_fewer_layers
from oneshot.planning.experts import with_experts
from oneshot.planning.grid import Grid
from oneshot.planning.hidden_size import plan_hidden
from oneshot.planning.plan import Plan, RemovedUnit, dense_plan
from oneshot.planning.serving import MisfitError
from oneshot.planning.widths import meet_budget
from oneshot.serving import ANY

SECONDS_DIFFER = 0.1  # share by which a latency that is measured again may be another


def parameter_budget(target: Target, dense: StackShape) -> Budget:
    """Return the budget of a target that counts stored parameters."""
    is_ceiling = target.parameters is not None
    return Budget(target.wanted_parameters(dense.stored_parameters()), is_ceiling=is_ceiling)


def make_plan(
    grid: Grid, method: Method, target: Target, damages: Damages | None = None, budget: Budget | None = None
) -> Plan:
    """Return the kept sizes of every kind whose whole model comes nearest to the target, as `_plan` does.

    An error of a target out of reach advises only what reaches it.
    """
    budget = budget or parameter_budget(target, grid.dense)
    try:
        plan = _plan(grid, method, target, damages, budget)
        grid.refuse_misfits(plan)
    except OutOfReachError as error:
        advice = _within_reach(grid, method, target, damages, budget, error.least)
        raise OutOfReachError(error.budget, error.least, advice) if advice else error from None
    except MisfitError as error:
        unit = _heads_that_fit(grid, method, target, budget)
        further = f", or allow --set heads=id --set head_unit={unit}" if unit else ""
        raise MisfitError(f"{str(error)[:-1]}{further}.") from None
    return plan


def _within_reach(
    grid: Grid, method: Method, target: Target, damages: Damages | None, budget: Budget, least: float
) -> str:
    """Return what helps beside a target out of reach: the largest share within reach, and heads if they suffice."""
    whole = budget.target / (1 - (target.sparsity or 0)) if target.parameters is None else budget.measure(grid.dense)
    most = 1 - least / whole - (SECONDS_DIFFER if budget.unit == "seconds" else 0)
    share = math.floor(1000 * most) / 1000
    found = []
    if share > 0 and _reaches(grid, method, target, damages, replace(budget, target=whole * (1 - share))):
        found.append(f"ask for --sparsity {share:.3f} or less")
    with contextlib.suppress(ConfigError):
        with_heads = replace(method, heads="id", ranks="none" if method.plans_ranks else method.ranks)
        possible = not method.reduces_heads and grid.reason_against_heads() is None
        if possible and _reaches(grid, with_heads, target, None, budget):
            found.append("allow --set heads=id as well")
    return ", or ".join(found)


def _heads_that_fit(grid: Grid, method: Method, target: Target, budget: Budget) -> str | None:
    """Return the unit in which heads must shrink so that the result can be served; None if none helps."""
    if grid.reason_against_heads() is not None:
        return None
    ranks = "none" if method.plans_ranks else method.ranks
    units = (replace(method, heads="id", head_unit=unit, ranks=ranks) for unit in get_args(RemovedUnit))
    return next((unit.head_unit for unit in units if _reaches(grid, unit, target, None, budget)), None)


def _reaches(grid: Grid, method: Method, target: Target, damages: Damages | None, budget: Budget) -> bool:
    """Return whether there is a plan."""
    try:
        grid.refuse_misfits(_plan(grid, method, target, damages, budget))
    except (ConfigError, PlanError):
        return False
    return True


def least_share(grid: Grid, method: Method, target: Target, budget: Budget) -> float | None:
    """Return a share that removes something although a smaller one that is asked for removes nothing; None without."""
    whole = budget.measure(grid.dense)
    share = 1 - budget.target / whole
    while (share := round(1.5 * share + 0.0005, 3)) < 1:
        with contextlib.suppress(ConfigError, PlanError):
            plan = _plan(grid, method, target, None, replace(budget, target=whole * (1 - share)))
            if budget.measure(grid.stack(plan)) < whole:
                return share
    return None


def _plan(grid: Grid, method: Method, target: Target, damages: Damages | None, budget: Budget) -> Plan:
    """Return the kept sizes of every kind whose whole model comes nearest to the target.

    Sizes that the target states are kept. FFN and heads take what is left; the hidden size does if nothing else is
    reduced. With damages, FFN and heads take the sizes of least predicted damage. If groups of sublayers have their own
    subspaces, all widths are equal here, and `spread_hidden_sizes` may distribute them once the spectra are known.

    Args:
        method: settled for this grid (`Grid.settle`).

    Raises `ConfigError` for sizes that contradict each other, `PlanError` if a size or the target is out of reach, or
    the form cannot state it.
    """
    dense = budget.measure(grid.dense)
    if budget.target > dense:
        raise PlanError(
            f"The target of {budget.show(budget.target)} is above the dense model's {budget.show(dense)}; give less."
        )
    if grid.stored is not None and budget.target == dense:
        raise PlanError(
            "This model stores matrices of low rank, which are multiplied out when they are read, so a run that "
            "removes nothing writes a larger model; ask for --sparsity 0.01 or more, or say --set ranks=none "
            "embedding=none for that larger model."
        )
    # nothing was asked for, or nothing beyond the sizes that are stated
    sublayers_shrink = method.reduces_sublayers and budget.target != dense
    if sublayers_shrink and method.reduces_heads and (reason := grid.reason_against_heads()) is not None:
        raise PlanError(reason)
    if method.slices and target.budget != "parameters":
        raise ConfigError(f"--budget {target.budget} is for FFN neurons and heads; set hidden=none.")
    target = with_sizes(target, grid)
    plan = with_experts(grid, _stated_plan(grid, method, target), method, target, budget, damages)
    if method.slices and (budget.target < dense or target.hidden_size is not None):
        plan = plan_hidden(
            grid,
            plan,
            target,
            method.group_size,
            sublayers_shrink=sublayers_shrink,
            budget=budget,
        )
    grid.refuse(plan)
    shrinks = sublayers_shrink or (method.plans_experts and damages is not None)
    if not shrinks and (budget.target == dense or method.slices or method.reduces_experts):
        return plan
    start = budget.measure(grid.stack(plan))
    if start < budget.target:
        raise PlanError(
            f"The stated sizes leave {budget.show(start)}, fewer than the {budget.show(budget.target)} asked for; "
            "give larger ones."
        )
    if target.budget == "latency":
        _refuse_without_latencies(grid, method)

    def shrink(plan: Plan) -> Plan:
        try:
            return meet(plan, damages)
        except (OutOfReachError, MisfitError):
            may_rank = bool(grid.kept.ffn) or grid.serving != ANY or grid.stored is not None
            if damages is not None or not may_rank or not method.plans_ranks:
                raise
            # ranks beside FFNs that stay or that were multiplied out, before a profile knows what they cost
            return meet(plan, even_damages(grid, plan.head_unit))

    def meet(plan: Plan, damages: Damages | None) -> Plan:
        return meet_budget(
            grid,
            plan,
            budget,
            reduce_ffn=method.reduces_ffn,
            reduce_heads=method.reduces_heads,
            round_to=target.round_to,
            damages=damages,
            reduce_embedding=method.embedding != "none" and not grid.kept.embedding,
            leave_out_sublayers=method.leaves_out_sublayers,
            reduce_inner=method.plans_inner_sizes,
            ranked_kinds=_ranked_kinds(method, plan),
            reduce_experts=method.plans_experts,
        )

    if not method.leaves_out_layers or (method.leaves_out_sublayers and damages is not None):
        return shrink(plan)
    return with_fewer_layers(grid, plan, budget, damages, shrink if shrinks else None)


def with_steps(target: Target, shape: ModelShape, step: int) -> Target:
    """Return the target whose sizes are multiples of a step, and of which every GPU that serves it has whole groups."""
    serving = target.serving
    step = math.lcm(step, serving.tp * serving.group)
    if step == 1:
        return target
    otherwise = 1 if serving.group > 1 else default_round_to(shape.hidden_size)
    return replace(target, round_to=math.lcm(step, target.round_to or otherwise, shape.width_step))


def with_sizes(target: Target, grid: Grid) -> Target:
    """Return the target with the sizes that its rates stand for, rounded to the nearest; rotary pairs stay whole."""
    shape = grid.shape
    sizes: dict[str, Any] = {}
    if target.hidden_rate:
        sizes["hidden_size"] = max(1, round(shape.hidden_size * (1 - target.hidden_rate)))
    if target.inner_rate:
        kept, pair = 1 - target.inner_rate, 2 if grid.family.stack.rotary else 1
        sizes["intermediate_size"] = max(1, round(shape.intermediate_size * kept))
        inner = {
            "value_size": max(1, round(shape.head_dim * kept)),
            "query_key_size": max(1, round(shape.head_dim * kept / pair)) * pair,
        }
        sizes |= {name: size for name, size in inner.items() if size < shape.head_dim}  # the nearest may be the whole
    return replace(target, **sizes, hidden_rate=None, inner_rate=None)


def _stated_plan(grid: Grid, method: Method, target: Target) -> Plan:
    """Return the plan that keeps everything, but for the sizes inside sublayers that the target states."""
    _check_inner_sizes(grid, target)
    if method.plans_inner_sizes and (target.query_key_size or target.value_size):
        raise ConfigError("Give either --set inner_sizes=sensitivity or the sizes: query_key_size=, value_size=.")
    plan = dense_plan(grid.shape, method, target.query_key_size, target.value_size)
    if target.intermediate_size is not None:
        plan = _with_ffn_width(plan, grid.shape, method, target.intermediate_size)
    if not method.slices and target.hidden_size is not None:
        raise ConfigError("--set hidden_size= needs a method for the hidden size; add --set hidden=pca.")
    return plan


def _ranked_kinds(method: Method, plan: Plan) -> tuple[RankedKind, ...]:
    """Return the kinds of linears whose ranks are planned."""
    if not method.plans_ranks or plan.reduces_queries_keys or plan.reduces_values:
        return ()
    # steps for `up_proj` would give it its full rank again
    return tuple(kind for kind in RANKED_KINDS if not (kind == "up" and method.up_steps))


def _refuse_without_latencies(grid: Grid, method: Method) -> None:
    """Raise a `OneshotError` if the method changes what a profile has no latencies of."""
    if method.leaves_out_sublayers:
        raise ConfigError("--set depth=sublayers has no measured latencies; set depth=sensitivity or another budget.")
    if method.plans_inner_sizes:
        raise ConfigError(
            "--set inner_sizes=sensitivity has no measured latencies; leave it out or set another budget."
        )
    if method.reduces_heads and grid.family.reason_against("heads") is not None:
        raise PlanError(
            "--budget latency measures layers of the family's own class, which cannot have fewer heads; choose "
            "another budget, or set heads=none."
        )


def _with_ffn_width(plan: Plan, shape: ModelShape, method: Method, width: int) -> Plan:
    if not method.reduces_ffn:
        raise ConfigError(f"--set intermediate_size={width} needs a selector of neurons; add --set ffn=id.")
    if width > shape.intermediate_size:
        raise PlanError(
            f"--set intermediate_size={width} is above the model's {shape.intermediate_size}; give at most that."
        )
    if width % shape.width_step:
        raise PlanError(
            f"--set intermediate_size={width} is not a multiple of {shape.width_step}, as its FFN widths are."
        )
    return plan.with_width(width)


def _check_inner_sizes(grid: Grid, target: Target) -> None:
    for name, size in (("value_size", target.value_size), ("query_key_size", target.query_key_size)):
        if size is not None and size >= grid.shape.head_dim:
            raise PlanError(f"--set {name}={size} is not below the model's {grid.shape.head_dim}; give a smaller one.")
    if target.query_key_size is None:
        return
    reason = grid.family.reason_against("queries and keys")
    if reason is not None:
        raise PlanError(reason)
    if target.query_key_size % 2 and grid.family.stack.rotary:
        raise PlanError(f"--set query_key_size={target.query_key_size} is odd; rotary pairs need an even one.")


def predicted_divergences(
    grids: Mapping[str, Grid], method: Method, target: Target, plan: Plan, profile: Profile, budget: Budget
) -> dict[str, float]:
    """Return the KL divergence of the output from the dense model's, in nats per token, as the profile predicts it.

    It is given for the `plan`, and for the best plan of each form (`grids`) for the same target, which shows what a
    form costs. The `method` is not settled: each form settles its own. Small numbers are more reliable than large
    ones, because damages are assumed to add up.
    """
    any_grid = next(iter(grids.values()))
    damages, shape = profiled_damages(profile, "sensitivity", any_grid), any_grid.shape
    predicted = {"plan": predicted_damage(plan, shape, damages)}
    for form, grid in grids.items():
        with contextlib.suppress(PlanError, ConfigError):
            best = make_plan(grid, grid.settle(method, target), target, damages, budget)
            predicted[form] = predicted_damage(best, shape, damages)
    return predicted


CURVE_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def predicted_curve(grid: Grid, method: Method, target: Target, damages: Damages) -> dict[str, float]:
    """Return the divergence as `predicted_divergences` for other removed shares of the stored parameters, by share.

    Shares that the form or the method does not reach are left out. A target that counts something else has no curve.

    Args:
        method: settled for this grid. damages: by `sensitivity`.
    """
    if target.budget != "parameters":
        return {}
    curve = {}
    for share in CURVE_SHARES:
        with contextlib.suppress(PlanError, ConfigError):
            plan = make_plan(grid, method, replace(target, sparsity=share, parameters=None, size_bytes=None), damages)
            curve[str(share)] = predicted_damage(plan, grid.shape, damages)
    return curve
