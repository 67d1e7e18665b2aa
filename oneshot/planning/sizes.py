"""All kinds of sizes for one target, within what the form can state."""

import contextlib
import math
from dataclasses import replace
from typing import get_args

from oneshot.architecture import StackShape
from oneshot.config import Target
from oneshot.errors import ConfigError, PlanError
from oneshot.method import HeadUnit, Method
from oneshot.planning.budget import Budget, OutOfReachError
from oneshot.planning.damages import Damages, even_damages
from oneshot.planning.equal_sizes import (
    plans_with_equal_heads,
    plans_with_share_of_heads,
    plans_without_layers,
    with_equal_experts,
    with_equal_width,
)
from oneshot.planning.grid import Grid
from oneshot.planning.hidden_size import plan_hidden
from oneshot.planning.kept import NOTHING
from oneshot.planning.own_sizes import with_own_sizes
from oneshot.planning.plan import Plan, RemovedUnit
from oneshot.planning.problem import Problem, best_of, nearest
from oneshot.planning.serving import MisfitError
from oneshot.planning.stated import stated_plan, with_sizes
from oneshot.serving import ANY

SECONDS_DIFFER = 0.1  # share by which a latency that is measured again may be another


def parameter_budget(target: Target, dense: StackShape) -> Budget:
    """Return the budget of a target that counts stored parameters."""
    is_ceiling = target.parameters is not None
    return Budget(target.wanted_parameters(dense.stored_parameters()), is_ceiling=is_ceiling)


def make_plan(
    grid: Grid, method: Method, target: Target, damages: Damages | None = None, budget: Budget | None = None
) -> Plan:
    """Return the kept sizes of every kind whose whole model comes nearest to the target, as `planned` does.

    An error of a target out of reach advises only what reaches it.
    """
    problem = Problem(grid, method, target, budget or parameter_budget(target, grid.dense), damages)
    try:
        return planned(problem)
    except OutOfReachError as error:
        advice = _within_reach(problem, error.least)
        raise OutOfReachError(error.budget, error.least, advice) if advice else error from None
    except MisfitError as error:
        units = () if grid.reason_against_heads() is not None else get_args(RemovedUnit)
        unit = next((unit for unit in units if _with_heads(problem, unit)), None)
        further = f", or allow --set heads=id --set head_unit={unit}" if unit else ""
        raise MisfitError(f"{str(error)[:-1]}{further}.") from None


def planned(problem: Problem) -> Plan:
    """Return the kept sizes of every kind whose whole model comes nearest to the target.

    Sizes that the target states are kept. FFN and heads take what is left; the hidden size does if nothing else is
    reduced. With damages, FFN and heads take the sizes of least predicted damage. If groups of sublayers have their own
    subspaces, all widths are equal here, and `spread_hidden_sizes` may distribute them once the spectra are known.

    Raises `ConfigError` for sizes that contradict each other, `PlanError` if a size or the target is out of reach, or
    the form cannot state it.
    """
    grid, method, budget, damages = problem.grid, problem.method, problem.budget, problem.damages
    dense = budget.measure(grid.dense)
    removes = budget.target != dense  # or else nothing was asked for, or nothing beyond the sizes that are stated
    sublayers_shrink = method.reduces_sublayers and removes
    # 1. Refuse what no plan can be.
    _refuse(problem, dense)
    # 2. Keep the sizes that the target states.
    problem = replace(problem, target=with_sizes(problem.target, grid))
    plan = stated_plan(grid, method, problem.target)
    # 3. Choose one number of experts for all layers, or one hidden size, if these take what is left.
    own_experts = method.plans_experts and (damages is not None or method.reduces_sublayers)
    equal_experts = method.reduces_experts and problem.target.num_experts is None and not own_experts
    if equal_experts and problem.measure(plan) > budget.target:
        plan = with_equal_experts(problem, plan)
    if method.slices and (budget.target < dense or problem.target.hidden_size is not None):
        plan = plan_hidden(problem, plan, sublayers_shrink=sublayers_shrink)
    grid.refuse(plan)
    # 4. Let layers, and what is in them, take the rest.
    shrinks = sublayers_shrink or (method.plans_experts and damages is not None)
    if shrinks or (removes and not (method.slices or method.reduces_experts)):
        plan = _with_less_in_layers(problem, plan, shrinks=shrinks)
    grid.refuse_misfits(plan)
    return plan


def _with_less_in_layers(problem: Problem, plan: Plan, *, shrinks: bool) -> Plan:
    """Return the plan of least predicted damage among those without one layer, without two, and so on.

    Without damages layers go only if nothing else reaches the budget.

    Args:
        shrinks: whether what is in the layers that stay meets the budget; else the number of layers comes near to it.
    """
    method, target = problem.method, problem.budget.target
    if problem.measure(plan) < target:
        asked, start = problem.show(plan)
        raise PlanError(f"The stated sizes leave {start}, fewer than the {asked} asked for; give larger ones.")
    if problem.target.budget == "latency":
        _refuse_without_latencies(problem)
    whole_layers = method.leaves_out_layers and not problem.leaves_out_sublayers
    options = plans_without_layers(problem, plan) if whole_layers else [plan]
    if whole_layers and not shrinks:
        asked, least = problem.show(options[-1])
        num_layers = len(options[-1].kept_layers)
        alone = "one layer alone has" if num_layers == 1 else f"{num_layers} layers alone have"
        return nearest(problem, options, f"The target is {asked}, but {alone} {least}")
    # the last one is below the budget by its layers alone: fewer only do more damage
    below = [number for number, option in enumerate(options) if problem.measure(option) < target]
    return best_of(problem, options[: below[0] + 1] if below else options, lambda option: reduced(problem, option))


def reduced(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with fewer neurons, heads and experts, and of lower ranks, that meets the budget.

    Every layer has its own sizes if damages are known and the form lets layers differ. Otherwise all layers are equal
    and come as near to the budget as possible: heads lose the fraction that all sublayers must lose, or what does the
    least damage, and the FFN takes what is left.

    Args:
        plan: what is decided already, with all neurons and heads.

    Raises `PlanError` if nothing may be reduced or the budget is out of reach.
    """
    grid, method, target = problem.grid, problem.method, problem.budget.target
    total = problem.measure(plan)
    if total <= target:
        return plan
    _refuse_steps(problem)
    # 1. What is left to the end: the sizes of each layer, or one FFN width
    complete = with_own_sizes if problem.layers_differ else with_equal_width
    options = [plan]
    # 2. Heads that all layers share
    if method.reduces_heads and not (problem.layers_differ and grid.heads_differ):
        if problem.layers_differ and not method.reduces_ffn:
            raise PlanError(
                "This form has the same heads in every layer, so a profile has nothing to share out; allow --set "
                "ffn=id, or add --set allocation=uniform."
            )
        options = plans_with_equal_heads(problem, plan)
        if not method.reduces_ffn:
            most, surplus = (problem.budget.show(total - least) for least in (problem.measure(options[0]), target))
            return nearest(problem, options, f"Heads alone can give up {most} of the {surplus} asked for")
        if problem.damages is None:
            options = plans_with_share_of_heads(problem, plan, options)
        else:  # fewer heads than in the largest option below the budget only do more damage
            below = sum(problem.measure(option) < target for option in options)
            options = options[max(0, below - 1) :]
    # 3. The plan of least damage; before a profile, ranks may also go beside FFNs that stay or were multiplied out
    may_rank = bool(grid.kept.ffn) or grid.serving != ANY or grid.stored is not None
    try:
        return best_of(problem, options, lambda option: complete(problem, option))
    except (OutOfReachError, MisfitError):
        if problem.damages is not None or not may_rank or not method.plans_ranks:
            raise
        return reduced(replace(problem, damages=even_damages(grid, plan.head_unit)), plan)


def _refuse(problem: Problem, dense: float) -> None:
    """Raise a `OneshotError` for a target that no plan reaches, from the measure of the dense model."""
    grid, method, budget = problem.grid, problem.method, problem.budget
    grid.refuse_stages(grid.shape.num_hidden_layers)
    if budget.target > dense:
        more = "give less"
        if problem.target.sparsity:  # of bytes that a narrower dtype halves
            share = math.ceil(1000 * (1 - dense * (1 - problem.target.sparsity) / budget.target)) / 1000
            more = f"ask for --sparsity {share:.3f} or more"
        raise PlanError(
            f"The target of {budget.show(budget.target)} is above the dense model's {budget.show(dense)}; {more}."
        )
    if grid.stored is not None and budget.target == dense:
        raise PlanError(
            "This model stores matrices of low rank, which are multiplied out when they are read, so a run that "
            "removes nothing writes a larger model; ask for --sparsity 0.01 or more, or say --set ranks=none "
            "--set embedding=none for that larger model."
        )
    reason = grid.reason_against_heads() if method.reduces_heads and budget.target != dense else None
    if reason is not None:
        raise PlanError(reason)
    if method.slices and problem.target.budget != "parameters":
        raise ConfigError(f"--budget {problem.target.budget} is for FFN neurons and heads; set hidden=none.")


def _refuse_without_latencies(problem: Problem) -> None:
    """Raise a `OneshotError` if the method changes what a profile has no latencies of."""
    method = problem.method
    if method.leaves_out_sublayers:
        raise ConfigError("--set depth=sublayers has no measured latencies; set depth=sensitivity or another budget.")
    if method.plans_inner_sizes:
        raise ConfigError(
            "--set inner_sizes=sensitivity has no measured latencies; leave it out or set another budget."
        )
    if method.reduces_heads and problem.grid.family.reason_against("heads") is not None:
        raise PlanError(
            "--budget latency measures layers of the family's own class, which cannot have fewer heads; choose "
            "another budget, or set heads=none."
        )


def _refuse_steps(problem: Problem) -> None:
    """Raise a `PlanError` if nothing in the layers may be reduced, or not in steps of FFN widths."""
    grid, method, step = problem.grid, problem.method, problem.width_step
    if not (method.reduces_sublayers or method.plans_experts or problem.leaves_out_sublayers):
        module = grid.family.stack.feed_forward.out.rpartition(".")[0]
        ranks = f", or to reduce ranks beside whole FFNs, write --keep '*.{module}.*' in place of ffn=none"
        raise PlanError(
            "Nothing may be reduced (ffn=none, heads=none); allow one, such as --set ffn=id, or ask for --sparsity 0"
            f"{ranks if grid.has_ranks and module else ''}."
        )
    if method.reduces_ffn and step > grid.shape.intermediate_size:
        grid.refuse_step(step, "FFN width", grid.shape.intermediate_size)
    if method.reduces_ffn and step % grid.shape.width_step:
        raise PlanError(
            f"--round-to {step} is not a multiple of {grid.shape.width_step}, as FFN widths of this model are; give "
            "one."
        )


def _within_reach(problem: Problem, least: float) -> str:
    """Return what helps beside a target out of reach: the largest share within reach, and heads if they suffice."""
    grid, method, target, budget = problem.grid, problem.method, problem.target, problem.budget
    whole = budget.target / (1 - (target.sparsity or 0)) if target.parameters is None else budget.measure(grid.dense)
    most = 1 - least / whole - (SECONDS_DIFFER if budget.unit == "seconds" else 0)
    share = math.floor(1000 * most) / 1000
    found = []
    if share > 0 and _plan_of(replace(problem, budget=replace(budget, target=whole * (1 - share)))):
        found.append(f"ask for --sparsity {share:.3f} or less")
    if not method.reduces_heads and grid.reason_against_heads() is None and _with_heads(problem, method.head_unit):
        found.append("allow --set heads=id as well")
    if grid.kept != NOTHING and _plan_of(replace(problem, grid=replace(grid, kept=NOTHING))):
        found.append("leave out --keep")
    return ", or ".join(found)


def _with_heads(problem: Problem, head_unit: HeadUnit) -> Plan | None:
    """Return the plan for equal layers with fewer heads and without ranks; None without one.

    Where ranks are not planned, no output curvature has the price of an embedding beside an output head.
    """
    method, found = problem.method, None
    with contextlib.suppress(ConfigError):
        if method.plans_ranks:
            method = replace(method, ranks="none", embedding=method.embedding if problem.grid.shape.tied else "none")
        method = replace(method, heads="id", head_unit=head_unit)
        found = _plan_of(replace(problem, method=method, damages=None))
    return found


def _plan_of(problem: Problem) -> Plan | None:
    """Return the plan; None without one."""
    with contextlib.suppress(ConfigError, PlanError):
        return planned(problem)
    return None


def least_share(grid: Grid, method: Method, target: Target, budget: Budget) -> float | None:
    """Return a share that removes something although a smaller one that is asked for removes nothing; None without."""
    whole = budget.measure(grid.dense)
    share = 1 - budget.target / whole
    while (share := round(1.5 * share + 0.0005, 3)) < 1:
        problem = Problem(grid, method, target, replace(budget, target=whole * (1 - share)))
        plan = _plan_of(problem)
        if plan is not None and problem.measure(plan) < whole:
            return share
    return None
