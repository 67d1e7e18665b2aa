"""Budget -> Plan: the kept sizes that reach a number of stored parameters, within what the tier can hold."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from oneshot.config import TIERS, CompressionConfig
from oneshot.errors import ConfigError, PlanError
from oneshot.linalg.allocation import least_damage
from oneshot.recipes import Recipe
from oneshot.records import LEFT_OUT, HiddenPlan, LayerPlan, ModelShape, Plan, Profile, StackShape

MAX_ROUND_TO = 64
PRICE_STEPS = 60  # bisection steps for the price of a parameter


@dataclass(frozen=True)
class Budget:
    """What a plan may take: `measure` of its sizes, at most (or as near as can be to) `target`, in `unit`s."""

    target: float
    measure: Callable[[StackShape], float] = StackShape.stored_parameters
    unit: str = "parameters"

    def show(self, amount: float) -> str:
        """`107,972,928 parameters`, `0.0131 seconds`."""
        return f"{amount:,.4f} {self.unit}" if self.unit == "seconds" else f"{amount:,.0f} {self.unit}"


@dataclass(frozen=True)
class Damages:
    """What is lost by keeping k neurons, `ffn (layers, n + 1)`, or k head units, `heads (layers, units + 1)`.

    `layers (layers,)`: by leaving out a whole layer; in nats per token, as only sensitivities are.
    """

    ffn: torch.Tensor
    heads: torch.Tensor
    layers: torch.Tensor


def default_round_to(size: int) -> int:
    """The largest power of two up to 64 that is at most 1/16 of the width (GPUs and quantisers like multiples)."""
    step = MAX_ROUND_TO
    while step > 1 and step * 16 > size:
        step //= 2
    return step


def plan_sizes(
    config: CompressionConfig,
    recipe: Recipe,
    shape: ModelShape,
    damages: Damages | None = None,
    budget: Budget | None = None,
) -> Plan:
    """The kept sizes of every kind whose whole model comes nearest to the target.

    What the user says is kept as said (`hidden_size`, `value_size`, `query_key_size`). FFN and heads, where the recipe
    reduces them, take what is left; the hidden size does where nothing else is reduced. Where groups of blocks have
    subspaces of their own and no width was said, all widths are equal here, and `spread_hidden_sizes` shares the
    parameters out once the spectra are known.

    With damages, FFN and heads take the sizes of which the least is predicted.

    Raises `ConfigError` for sizes that do not go together, `PlanError` where a size or the target is out of reach, or
    the tier cannot hold it.
    """
    blocks = recipe.ffn != "none" or recipe.heads != "none"
    if budget is None:
        budget = Budget(wanted_parameters(config, shape.stack().stored_parameters()))
    dense = budget.measure(shape.stack())
    if budget.target > dense:
        raise PlanError(f"The target of {budget.show(budget.target)} is above the dense model's {budget.show(dense)}.")
    if budget.target == dense:  # nothing was asked for, or nothing beyond the sizes said
        blocks = False
    if recipe.hidden != "none" and config.budget != "parameters":
        raise ConfigError(f"--budget {config.budget} goes with FFN neurons and heads; leave --hidden none.")
    _check_inner_sizes(config, shape)
    whole = LayerPlan(shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads)
    plan = Plan(
        (whole,) * shape.num_hidden_layers,
        head_unit(config, shape),
        query_key_size=config.query_key_size,
        value_size=config.value_size,
        tier=recipe.tier,
    )
    if recipe.hidden == "none" and config.hidden_size is not None:
        raise ConfigError("--hidden-size needs a method for the hidden size; add --hidden pca.")
    if recipe.hidden != "none" and (budget.target < dense or config.hidden_size is not None):
        plan = _plan_hidden(config, recipe, shape, plan, blocks=blocks, target_parameters=round(budget.target))
    refuse_if_not_held(plan, shape)
    if blocks or (budget.target < dense and recipe.hidden == "none"):
        start = budget.measure(plan.stack(shape))
        if start < budget.target:
            raise PlanError(
                f"The sizes given leave {budget.show(start)}, fewer than the {budget.show(budget.target)} asked for; "
                "give larger ones."
            )

        def meet_budget(plan: Plan) -> Plan:
            return make_plan(
                shape,
                plan,
                budget,
                reduce_ffn=recipe.ffn != "none",
                reduce_heads=recipe.heads != "none",
                round_to=config.round_to,
                damages=damages,
            )

        if recipe.depth == "none":
            return meet_budget(plan)
        return _with_fewer_layers(shape, plan, budget, damages, meet_budget if blocks else None)
    return plan


def head_unit(config: CompressionConfig, shape: ModelShape) -> str:
    """What a removed head is: as asked for, or by default what is smaller."""
    if config.head_unit != "auto":
        return config.head_unit
    return "query-head" if shape.heads_per_group > 1 else "kv-group"


def wanted_parameters(config: CompressionConfig, dense_parameters: int) -> int:
    """The stored parameters that the target asks for; those of the dense model where sizes say everything."""
    if config.params is not None:
        return config.params
    return round(dense_parameters * (1 - (config.sparsity or 0.0)))


def refuse_if_not_held(plan: Plan, shape: ModelShape) -> None:
    """Raise `PlanError`, naming the size, where the plan's tier cannot hold it."""
    if plan.tier != "stock":
        return
    assert plan.is_uniform()
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
    budget: Budget,
    *,
    reduce_ffn: bool,
    reduce_heads: bool,
    round_to: int | None,
    damages: Damages | None = None,
) -> Plan:
    """The plan with fewer neurons and heads that meets the budget; FFN widths are multiples of `round_to`.

    Without `damages` all layers are alike and come as near to the budget as they can: with both kinds reduced, heads
    take the fraction nearest to the one that all blocks have to give, never more than one head per group below it,
    and the FFN takes what is left. With them the least damage within the budget is chosen: among plans whose layers
    are alike in the stock tier, among all others.

    Args:
        plan: what is decided already; its neurons and heads are all there.

    Raises `PlanError` when nothing may be reduced or the budget is out of reach.
    """
    surplus = budget.measure(plan.stack(shape)) - budget.target
    if surplus == 0:
        return plan
    if not reduce_ffn and not reduce_heads:
        raise PlanError("Nothing may be reduced (--ffn none --heads none); allow one, or ask for --sparsity 0.")
    step = round_to or default_round_to(shape.intermediate_size)
    if reduce_ffn and step > shape.intermediate_size:
        raise PlanError(f"--round-to {step} is above the FFN width of {shape.intermediate_size}; give a smaller one.")
    if damages is not None and plan.tier == "per-layer":
        return _spread(shape, plan, budget, damages, step if reduce_ffn else None, reduce_heads=reduce_heads)
    if not reduce_heads:
        return _with_width(shape, plan, budget, step)
    options = _head_options(shape, plan)
    if not reduce_ffn:
        return _nearest_heads(shape, plan, options, budget, surplus)
    if damages is not None:
        return _least_damage(shape, options, budget, damages, step)
    fraction = surplus / sum(layer.parameters() for layer in plan.stack(shape).layers)
    kept = max(1, len(options) - round(fraction * len(options)))
    # where attention outweighs the FFN one head may be more than is asked for; all of them remove nothing
    fitting = (option for option in options[kept - 1 :] if budget.measure(option.stack(shape)) >= budget.target)
    return _with_width(shape, next(fitting), budget, step)


def _with_fewer_layers(
    shape: ModelShape,
    plan: Plan,
    budget: Budget,
    damages: Damages | None,
    meet_budget: Callable[[Plan], Plan] | None,
) -> Plan:
    """The plan of least predicted damage among those without one layer, without two, and so on.

    Layers go in the order of what leaving out each alone costs, the last ones first where that is not known yet.
    `meet_budget` shrinks those that stay to the budget; without it the number of layers that comes nearest to it is
    taken. Without damages, before they are measured, layers go only where nothing else reaches the budget.
    """
    known = torch.arange(shape.num_hidden_layers, 0, -1) if damages is None else damages.layers
    fewer = [plan]
    for layer in known.argsort().tolist()[:-1]:
        layers = list(fewer[-1].layers)
        layers[layer] = LEFT_OUT
        fewer.append(replace(plan, layers=tuple(layers)))
    measured = [(option, budget.measure(option.stack(shape))) for option in fewer]
    if meet_budget is None:
        nearest, measure = min(measured, key=lambda pair: abs(pair[1] - budget.target))
        if nearest == fewer[-1] and measure > budget.target:
            raise PlanError(
                f"The target is {budget.show(budget.target)}, but one layer alone has {budget.show(measure)}; ask for "
                "a smaller --sparsity, or allow --ffn id as well."
            )
        return nearest
    plans: list[Plan] = []
    refusal: PlanError | None = None
    for option, measure in measured:
        if plans and (damages is None or measure < budget.target):
            break
        if measure < budget.target:  # layers more are too large at their narrowest
            return option
        try:
            plans.append(meet_budget(option))
        except PlanError as error:
            refusal = error  # at last that of the fewest layers
    if damages is not None and plans:
        return min(plans, key=lambda plan: predicted_damage(plan, shape, damages))
    if plans:
        return plans[0]
    assert refusal is not None
    raise refusal


def _alike(plan: Plan, **sizes: int) -> Plan:
    """The plan with these sizes in every layer that stays."""
    return replace(plan, layers=tuple(kept if kept.is_left_out else replace(kept, **sizes) for kept in plan.layers))


def _head_sizes(shape: ModelShape, head_unit: str) -> list[dict[str, int]]:
    """Heads for every number of kept units, from one to all of them."""
    groups, per_group = shape.num_key_value_heads, shape.heads_per_group
    if head_unit == "kv-group":
        kept = [(units * per_group, units) for units in range(1, groups + 1)]
    else:
        kept = [(units * groups, groups) for units in range(1, per_group + 1)]
    return [{"num_attention_heads": heads, "num_key_value_heads": left} for heads, left in kept]


def _head_options(shape: ModelShape, plan: Plan) -> list[Plan]:
    """The plan with one head unit in every layer, with two, up to all."""
    return [_alike(plan, **sizes) for sizes in _head_sizes(shape, plan.head_unit)]


def _nearest_heads(shape: ModelShape, plan: Plan, options: list[Plan], budget: Budget, surplus: float) -> Plan:
    """As many heads as come nearest to the budget."""
    most = budget.measure(plan.stack(shape)) - budget.measure(options[0].stack(shape))
    if surplus > most:
        raise PlanError(
            f"Heads alone can give up {budget.show(most)} of the {budget.show(surplus)} asked for; "
            "ask for less or allow --ffn id."
        )
    return min(options, key=lambda option: abs(budget.measure(option.stack(shape)) - budget.target))


def _with_width(shape: ModelShape, plan: Plan, budget: Budget, step: int) -> Plan:
    """The FFN width of all layers, a multiple of `step`, that comes nearest to the budget."""
    widths = [*range(step, shape.intermediate_size, step), shape.intermediate_size]
    options = [_alike(plan, intermediate_size=width) for width in widths]
    measures = [budget.measure(option.stack(shape)) for option in options]
    if budget.target < measures[0] - (measures[1] - measures[0] if len(measures) > 1 else 0) / 2:
        raise PlanError(
            f"The target is {budget.show(budget.target)}, but this recipe gets down to {budget.show(measures[0])} at "
            "best; ask for a smaller --sparsity, or allow --heads id as well."
        )
    return min(zip(options, measures, strict=True), key=lambda pair: abs(pair[1] - budget.target))[0]


def _least_damage(shape: ModelShape, options: list[Plan], budget: Budget, damages: Damages, step: int) -> Plan:
    """Of every number of heads, with the FFN width that meets the budget beside it, the least predicted damage."""
    fitting = []
    for option in options:
        if budget.measure(option.stack(shape)) >= budget.target:
            with contextlib.suppress(PlanError):
                fitting.append(_with_width(shape, option, budget, step))
    if not fitting:
        raise PlanError(
            f"No FFN width and no number of heads reaches {budget.target:,.0f} {budget.unit}; ask for more."
        )
    return min(fitting, key=lambda plan: predicted_damage(plan, shape, damages))


def _spread(
    shape: ModelShape, plan: Plan, budget: Budget, damages: Damages, step: int | None, *, reduce_heads: bool
) -> Plan:
    """Sizes of every layer's own with the least sum of damages within the budget (`linalg.allocation`)."""
    widths = [shape.intermediate_size]
    if step is not None:
        widths = [*range(step, shape.intermediate_size, step), shape.intermediate_size]
    heads = _head_sizes(shape, plan.head_unit) if reduce_heads else _head_sizes(shape, plan.head_unit)[-1:]
    kinds = [{"intermediate_size": width} for width in widths], heads
    total = budget.measure(plan.stack(shape))
    tables: list[np.ndarray] = []
    costs: list[np.ndarray] = []
    for layer in plan.kept_layers:
        kept = plan.layers[layer]
        tables += [damages.ffn[layer, widths].numpy(), damages.heads[layer, -len(heads) :].numpy()]
        if not costs or plan.hidden is not None:  # without a plan for the hidden size layers are alike
            before, after = plan.layers[:layer], plan.layers[layer + 1 :]
            prices = []
            for choices in kinds:
                options = [replace(plan, layers=(*before, replace(kept, **choice), *after)) for choice in choices]
                prices.append(np.array([budget.measure(option.stack(shape)) - total for option in options]))
        costs += prices
    chosen = least_damage(tables, costs, budget.target - total)
    if chosen is None:
        least = total + sum(float(cost.min()) for cost in costs)
        raise PlanError(
            f"The target is {budget.show(budget.target)}, but this recipe gets down to {budget.show(least)} at best; "
            "ask for a smaller --sparsity, or allow --heads id as well."
        )
    layers = list(plan.layers)
    for layer, width, units in zip(plan.kept_layers, chosen[::2], chosen[1::2], strict=True):
        layers[layer] = LayerPlan(widths[width], **heads[units])
    return replace(plan, layers=tuple(layers))


def profiled_damages(profile: Profile, allocation: str) -> Damages:
    """What every size of every block is taken to cost.

    `error`: the relative squared error of the block's output. `stat`: its root times `l + 50` (STAT A.4).
    `block-influence`: the squared error times the layer's block influence (ShortGPT). `sensitivity`: times what the
    model's output was measured to diverge by, so in nats per token, as if damages of blocks added up.
    """
    depth = torch.arange(len(profile.block_influence), dtype=torch.float64).unsqueeze(1)
    if allocation == "stat":
        weights = depth + 50
        ffn, heads = weights * profile.ffn_errors.sqrt(), weights * profile.head_errors.sqrt()
        return Damages(ffn, heads, profile.layer_divergence)
    ones = torch.ones(len(depth), dtype=torch.float64)
    ffn, heads = {
        "error": (ones, ones),
        "block-influence": (profile.block_influence, profile.block_influence),
        "sensitivity": (profile.ffn_sensitivity, profile.head_sensitivity),
    }[allocation]
    return Damages(
        ffn.unsqueeze(1) * profile.ffn_errors, heads.unsqueeze(1) * profile.head_errors, profile.layer_divergence
    )


def predicted_divergences(
    config: CompressionConfig, recipe: Recipe, shape: ModelShape, plan: Plan, profile: Profile, budget: Budget
) -> dict[str, float]:
    """KL divergence of the output from the dense model's, in nats per token, as the profile predicts it.

    Of the `plan`, and of the best plans of each tier for the same target: what a stock form costs. Small numbers can be
    trusted more than large ones, because damages are taken to add up.
    """
    damages = profiled_damages(profile, "sensitivity")
    predicted = {"plan": predicted_damage(plan, shape, damages)}
    for tier in TIERS:
        with contextlib.suppress(PlanError):
            best = plan_sizes(config, replace(recipe, tier=tier), shape, damages, budget)
            predicted[tier] = predicted_damage(best, shape, damages)
    return predicted


def predicted_damage(plan: Plan, shape: ModelShape, damages: Damages) -> float:
    """The sum of the damages of a plan's sizes."""
    total = 0.0
    for layer, kept in enumerate(plan.layers):
        if kept.is_left_out:
            total += float(damages.layers[layer])
            continue
        if plan.head_unit == "kv-group":
            removed = shape.num_key_value_heads - kept.num_key_value_heads
        else:
            removed = (shape.num_attention_heads - kept.num_attention_heads) // shape.num_key_value_heads
        total += float(damages.ffn[layer, kept.intermediate_size] + damages.heads[layer, -1 - removed])
    return total
