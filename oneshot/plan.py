"""Budget -> Plan: the kept sizes that reach a number of stored parameters, within what the tier can hold."""

import math
from dataclasses import replace

import torch

from oneshot.config import CompressionConfig
from oneshot.errors import ConfigError, PlanError
from oneshot.recipes import Recipe
from oneshot.records import HiddenPlan, ModelShape, Plan

MAX_ROUND_TO = 64
PRICE_STEPS = 60  # bisection steps for the price of a parameter


def default_round_to(size: int) -> int:
    """The largest power of two up to 64 that is at most 1/16 of the width (GPUs and quantisers like multiples)."""
    step = MAX_ROUND_TO
    while step > 1 and step * 16 > size:
        step //= 2
    return step


def plan_sizes(config: CompressionConfig, recipe: Recipe, shape: ModelShape) -> Plan:
    """The kept sizes of every kind whose whole model comes nearest to the target.

    What the user says is kept as said (`hidden_size`, `value_size`, `query_key_size`). FFN and heads, where the recipe
    reduces them, take what is left; the hidden size does where nothing else is reduced. Where groups of blocks have
    subspaces of their own and no width was said, all widths are equal here, and `spread_hidden_sizes` shares the
    parameters out once the spectra are known.

    Raises `ConfigError` for sizes that do not go together, `PlanError` where a size or the target is out of reach, or
    the tier cannot hold it.
    """
    blocks = recipe.ffn != "none" or recipe.heads != "none"
    dense = shape.stack().stored_parameters()
    target_parameters = wanted_parameters(config, dense)
    if target_parameters > dense:
        raise PlanError(f"The target of {target_parameters:,} parameters is above the dense model's {dense:,}.")
    if target_parameters == dense:  # nothing was asked for, or nothing beyond the sizes said
        blocks = False
    _check_inner_sizes(config, shape)
    unit = config.head_unit
    plan = Plan(
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        ("query-head" if shape.heads_per_group > 1 else "kv-group") if unit == "auto" else unit,
        query_key_size=config.query_key_size,
        value_size=config.value_size,
        tier=recipe.tier,
    )
    if recipe.hidden == "none" and config.hidden_size is not None:
        raise ConfigError("--hidden-size needs a method for the hidden size; add --hidden pca.")
    if recipe.hidden != "none" and (target_parameters < dense or config.hidden_size is not None):
        plan = _plan_hidden(config, recipe, shape, plan, blocks=blocks, target_parameters=target_parameters)
    refuse_if_not_held(plan, shape)
    if blocks or (target_parameters < dense and recipe.hidden == "none"):
        start = plan.stack(shape).stored_parameters()
        if start < target_parameters:
            raise PlanError(
                f"The sizes given leave {start:,} parameters, fewer than the {target_parameters:,} asked for; "
                "give larger ones."
            )
        plan = make_plan(
            shape,
            plan,
            target_parameters=target_parameters,
            reduce_ffn=recipe.ffn != "none",
            reduce_heads=recipe.heads != "none",
            round_to=config.round_to,
        )
    return plan


def wanted_parameters(config: CompressionConfig, dense_parameters: int) -> int:
    """The stored parameters that the target asks for; those of the dense model where sizes say everything."""
    if config.params is not None:
        return config.params
    return round(dense_parameters * (1 - (config.sparsity or 0.0)))


def refuse_if_not_held(plan: Plan, shape: ModelShape) -> None:
    """Raise `PlanError`, naming the size, where the plan's tier cannot hold it."""
    if plan.tier != "stock":
        return
    for flag, size in (("value-size", plan.value_size), ("query-key-size", plan.query_key_size)):
        if size is not None:
            raise PlanError(f"--{flag} {size} has no place in a stock config; add --tier per-layer.")
    if plan.hidden is not None and plan.hidden.num_groups > 1:
        raise PlanError(
            f"{plan.hidden.num_groups} groups with subspaces of their own need shortcut matrices, which no stock "
            "config holds; add --tier per-layer, or --group-size 0."
        )
    if plan.hidden is not None and shape.norm_bias:
        raise PlanError(
            f"Hidden size {plan.hidden.sizes[0]} turns LayerNorms into RMSNorms, which this family's stock config does "
            "not hold; add --tier per-layer."
        )


def _check_inner_sizes(config: CompressionConfig, shape: ModelShape) -> None:
    for flag, size in (("value-size", config.value_size), ("query-key-size", config.query_key_size)):
        if size is not None and size >= shape.head_dim:
            raise PlanError(f"--{flag} {size} is not below the model's {shape.head_dim}; give a smaller one.")
    if config.query_key_size is None:
        return
    if shape.query_key_norms:
        raise PlanError("--query-key-size is not possible where queries and keys are normed (Qwen3); leave it out.")
    if config.query_key_size % 2 and shape.num_positions == 0:
        raise PlanError(f"--query-key-size {config.query_key_size} is odd; rotary pairs need an even one.")


def _plan_hidden(
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


def make_plan(
    shape: ModelShape,
    plan: Plan,
    *,
    target_parameters: int,
    reduce_ffn: bool,
    reduce_heads: bool,
    round_to: int | None,
) -> Plan:
    """The plan with fewer neurons and heads whose stored parameters come nearest to the target.

    With both kinds reduced, heads take the fraction nearest to the one that all blocks have to give, never more than
    one head per group below it; FFN width takes what is left, to a multiple of `round_to`.

    Args:
        plan: what is decided already; its neurons and heads are all there. target_parameters: of the whole model.

    Raises `PlanError` when nothing may be reduced or the target is out of reach.
    """
    before = plan.stack(shape)
    surplus = before.stored_parameters() - target_parameters
    if surplus == 0:
        return plan
    if not reduce_ffn and not reduce_heads:
        raise PlanError("Nothing may be reduced (--ffn none --heads none); allow one, or ask for --sparsity 0.")
    if reduce_heads:
        fraction = surplus / before.block_parameters() if reduce_ffn else None
        plan = _plan_heads(shape, plan, surplus, fraction)
    if reduce_ffn:
        plan = _plan_width(shape, plan, target_parameters, round_to or default_round_to(shape.intermediate_size))
    return plan


def removed_parameters(shape: ModelShape, before: Plan, after: Plan) -> int:
    """Stored parameters that one plan keeps beyond another."""
    return before.stack(shape).stored_parameters() - after.stack(shape).stored_parameters()


def _plan_heads(shape: ModelShape, plan: Plan, surplus: int, fraction: float | None) -> Plan:
    """Remove heads: the given fraction of them, or (None) as many as come nearest to the surplus."""
    units = shape.num_key_value_heads if plan.head_unit == "kv-group" else shape.heads_per_group
    options = [_keep_units(shape, plan, kept) for kept in range(1, units + 1)]
    if fraction is not None:
        kept = max(1, units - round(fraction * units))
        # where attention outweighs the FFN one head may be more than is asked for; all of them remove nothing
        return next(option for option in options[kept - 1 :] if removed_parameters(shape, plan, option) <= surplus)
    best = min(options, key=lambda option: abs(removed_parameters(shape, plan, option) - surplus))
    most = removed_parameters(shape, plan, options[0])
    if surplus > most:
        raise PlanError(
            f"Heads alone can give up {most:,} parameters of the {surplus:,} asked for; ask for less or allow --ffn id."
        )
    return best


def _keep_units(shape: ModelShape, plan: Plan, kept: int) -> Plan:
    if plan.head_unit == "kv-group":
        return replace(plan, kept_num_attention_heads=kept * shape.heads_per_group, kept_num_key_value_heads=kept)
    groups = shape.num_key_value_heads
    return replace(plan, kept_num_attention_heads=kept * groups)


def _plan_width(shape: ModelShape, plan: Plan, target_parameters: int, round_to: int) -> Plan:
    """The FFN width, a multiple of `round_to`, that comes nearest to the target."""
    if round_to > shape.intermediate_size:
        raise PlanError(
            f"--round-to {round_to} is above the FFN width of {shape.intermediate_size}; give a smaller one."
        )
    start = plan.stack(shape).stored_parameters()
    per_neuron = (
        start - replace(plan, kept_intermediate_size=shape.intermediate_size - 1).stack(shape).stored_parameters()
    )
    exact = shape.intermediate_size - (start - target_parameters) / per_neuron
    width = min(round(exact / round_to) * round_to, shape.intermediate_size)
    if width < round_to:
        least = start - per_neuron * (shape.intermediate_size - round_to)
        raise PlanError(
            f"The target is {target_parameters:,} parameters, but this recipe can get down to {least:,} at best; "
            "ask for a smaller --sparsity, or allow --heads id as well."
        )
    return replace(plan, kept_intermediate_size=width)
