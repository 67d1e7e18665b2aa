"""The hidden size: which positions share a subspace, and how wide it is."""

import math
from dataclasses import replace

import torch

from oneshot.config import CompressionConfig
from oneshot.errors import ConfigError, PlanError
from oneshot.plan.budget import default_round_to
from oneshot.recipes import Recipe
from oneshot.records import HiddenPlan, ModelShape, Plan

PRICE_STEPS = 60  # bisection steps for the price of a parameter


def plan_hidden(
    config: CompressionConfig, recipe: Recipe, shape: ModelShape, plan: Plan, *, blocks: bool, target_parameters: int
) -> Plan:
    """The plan with one width for all groups: the one given, or the one that comes nearest to the target."""
    by_target = config.hidden_size is None
    if blocks and by_target:
        raise ConfigError("Give --hidden-size where FFN or heads shrink, too; they take what is left.")
    if not blocks and not by_target and (config.sparsity is not None or config.params is not None):
        raise ConfigError("Give either --hidden-size or a target where nothing but the hidden size shrinks.")
    group_of = groups_of_positions(shape.num_hidden_layers, recipe.group_size)

    def with_width(size: int) -> Plan:
        return replace(plan, hidden=HiddenPlan(group_of, (size,) * len(group_of)))

    if config.hidden_size is not None:
        if config.hidden_size >= shape.hidden_size:
            raise PlanError(
                f"--hidden-size {config.hidden_size} is not below the model's {shape.hidden_size}; give a smaller one."
            )
        return with_width(config.hidden_size)
    step = config.round_to or default_round_to(shape.hidden_size)
    widths = range(step, shape.hidden_size, step)
    if not widths:
        raise PlanError(f"--round-to {step} is above the hidden size of {shape.hidden_size}; give a smaller one.")
    parameters = {size: with_width(size).stack(shape).stored_parameters() for size in widths}
    largest = with_width(shape.hidden_size).stack(shape).stored_parameters()
    if not parameters[widths[0]] <= target_parameters <= largest:
        raise PlanError(
            f"The hidden size alone cannot reach {target_parameters:,} parameters: {widths[0]} gives "
            f"{parameters[widths[0]]:,}, all of it {largest:,}; ask for less, or shrink the FFN instead (--ffn id)."
        )
    return with_width(min(widths, key=lambda size: abs(parameters[size] - target_parameters)))


def groups_of_positions(num_layers: int, group_size: int) -> tuple[int, ...]:
    """The group of every position: `group_size` blocks (attention or FFN) share one, 0 puts all into one.

    The last norm belongs to the last group (SP3 appendix F.1).
    """
    blocks = 2 * num_layers
    size = group_size or blocks
    return (*(block // size for block in range(blocks)), (blocks - 1) // size)


def spread_hidden_sizes(
    plan: Plan, shape: ModelShape, energies: torch.Tensor, *, target_parameters: int, round_to: int | None
) -> Plan:
    """Widths of the groups from their spectra: the least energy lost at the number of stored parameters wanted.

    A direction stays while the share of energy that its group's positions lose without it outweighs the parameters
    that it costs; one price for all groups, found by bisection (a Lagrange multiplier).

    Args:
        energies: `(positions, D)`, along the directions of each position's group, the strongest first.
    """
    assert plan.hidden is not None
    group_of, step = plan.hidden.group_of, round_to or default_round_to(shape.hidden_size)
    shares = energies / energies.sum(1, keepdim=True)
    groups = range(plan.hidden.num_groups)
    gains = torch.stack([shares[[group == member for member in group_of]].sum(0) for group in groups])
    widths = torch.arange(step, shape.hidden_size + 1, step)

    def with_sizes(sizes: list[int]) -> Plan:
        return replace(plan, hidden=HiddenPlan(group_of, tuple(sizes[group] for group in group_of)))

    def total(sizes: list[int]) -> int:
        return with_sizes(sizes).stack(shape).stored_parameters()

    uniform = [plan.hidden.sizes[group_of.index(group)] for group in groups]
    prices = torch.tensor(
        [total(uniform) - total([*uniform[:group], uniform[group] - step, *uniform[group + 1 :]]) for group in groups]
    )
    # what each further step of width brings, per parameter; spectra fall, so a threshold keeps the first ones
    tails = gains.cumsum(1)[:, widths - 1].diff(dim=1) / prices.unsqueeze(1)
    low, high = math.log(float(tails.clamp_min(1e-300).min())), math.log(float(tails.max()))
    best = [int(widths[-1])] * len(groups)
    for _ in range(PRICE_STEPS):
        middle = (low + high) / 2
        sizes = [int(widths[count]) for count in (tails > math.exp(middle)).long().cumprod(1).sum(1)]
        if abs(total(sizes) - target_parameters) <= abs(total(best) - target_parameters):
            best = sizes
        low, high = (middle, high) if total(sizes) > target_parameters else (low, middle)
    return with_sizes(best)
