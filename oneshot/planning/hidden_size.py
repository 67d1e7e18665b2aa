"""The hidden size: positions that share a subspace, and its width."""

import math
from dataclasses import replace

import torch

from oneshot.errors import ConfigError, PlanError
from oneshot.planning.budget import Budget, default_round_to
from oneshot.planning.grid import Grid
from oneshot.planning.plan import HiddenPlan, Plan
from oneshot.planning.problem import Problem, nearest

PRICE_STEPS = 60  # bisection steps for the price of a parameter


def plan_hidden(problem: Problem, plan: Plan, *, sublayers_shrink: bool) -> Plan:
    """Return the plan with one width for all groups: the given one, or the one that the budget chooses."""
    grid, target, shape = problem.grid, problem.target, problem.grid.shape
    by_target = target.hidden_size is None
    if sublayers_shrink and by_target:
        raise ConfigError("Give --set hidden_size= if FFN or heads also shrink; they take what is left.")
    if not sublayers_shrink and not by_target and target.states_share:
        raise ConfigError("Give either --set hidden_size= or a target if only the hidden size shrinks.")
    group_of = groups_of_positions(grid.family.last_stack.position(shape.num_hidden_layers), problem.method.group_size)

    def with_width(size: int) -> Plan:
        return replace(plan, hidden=HiddenPlan(group_of, (size,) * len(group_of)))

    if target.hidden_size is not None:
        if target.hidden_size > shape.hidden_size:
            raise PlanError(
                f"--set hidden_size={target.hidden_size} is above the model's {shape.hidden_size}; give at most that."
            )
        return with_width(target.hidden_size)
    step = target.round_to or default_round_to(shape.hidden_size)
    widths = range(step, shape.hidden_size, step)
    if not widths:
        grid.refuse_step(step, "hidden size", shape.hidden_size)
    options = [with_width(size) for size in widths]
    whole = with_width(shape.hidden_size)
    asked, least, most = problem.show(options[0], whole)
    refusal = f"The hidden size alone cannot reach {asked}: {widths[0]} gives {least}, all of it {most}"
    if problem.budget.target > problem.measure(whole):
        raise PlanError(f"{refusal}; ask for a smaller --sparsity.")
    return nearest(problem, options, refusal)


def groups_of_positions(sublayers: int, group_size: int) -> tuple[int, ...]:
    """Return the group of every position: `group_size` sublayers share one, 0 puts all into one.

    The final norm belongs to the last group (SP3 appendix F.1).
    """
    size = group_size or sublayers
    return (*(sublayer // size for sublayer in range(sublayers)), (sublayers - 1) // size)


def spread_hidden_sizes(
    grid: Grid, plan: Plan, energies: torch.Tensor, *, budget: Budget, round_to: int | None
) -> Plan:
    """Return the plan whose groups have the widths of least lost energy within a budget of stored parameters.

    A direction stays if its share of the group's energy, per parameter that it costs, is above one price for all
    groups. Bisection finds the price (a Lagrange multiplier).

    Args:
        energies: `(positions, D)`, along the directions of each position's group, the strongest first.
    """
    assert plan.hidden is not None
    shape = grid.shape
    group_of, step = plan.hidden.group_of, round_to or default_round_to(shape.hidden_size)
    # 1. What each direction of a group gains, and each step of its width costs
    shares = energies / energies.sum(1, keepdim=True)
    groups = range(plan.hidden.num_groups)
    gains = torch.stack([shares[[group == member for member in group_of]].sum(0) for group in groups])
    widths = torch.arange(step, shape.hidden_size + 1, step)

    def with_sizes(sizes: list[int]) -> Plan:
        return replace(plan, hidden=HiddenPlan(group_of, tuple(sizes[group] for group in group_of)))

    def total(sizes: list[int]) -> int:
        return grid.stack(with_sizes(sizes)).stored_parameters()

    uniform = [plan.hidden.sizes[group_of.index(group)] for group in groups]
    prices = torch.tensor(
        [total(uniform) - total([*uniform[:group], uniform[group] - step, *uniform[group + 1 :]]) for group in groups]
    )
    # 2. The gain of each further step of width per parameter; spectra fall, so a threshold keeps the first steps
    tails = gains.cumsum(1)[:, widths - 1].diff(dim=1) / prices.unsqueeze(1)
    # 3. The threshold that meets the budget
    low, high = math.log(float(tails.clamp_min(1e-300).min())), math.log(float(tails.max()))
    best = [int(widths[-1])] * len(groups)
    for _ in range(PRICE_STEPS):
        middle = (low + high) / 2
        sizes = [int(widths[count]) for count in (tails > math.exp(middle)).long().cumprod(1).sum(1)]
        best = budget.choose([sizes, best], [total(sizes), total(best)])
        low, high = (middle, high) if total(sizes) > budget.target else (low, middle)
    return with_sizes(best)
