"""FFN neurons and heads for a budget: all layers alike, or sizes of every layer's own where damages are known."""

import contextlib
from dataclasses import replace

import numpy as np

from oneshot.errors import PlanError
from oneshot.linalg.allocation import least_damage
from oneshot.plan.budget import Budget, default_round_to
from oneshot.plan.damages import Damages, predicted_damage
from oneshot.plan.vocabulary import table_options
from oneshot.records import LayerPlan, ModelShape, Plan, TableShape


def make_plan(
    shape: ModelShape,
    plan: Plan,
    budget: Budget,
    *,
    reduce_ffn: bool,
    reduce_heads: bool,
    round_to: int | None,
    damages: Damages | None = None,
    reduce_embedding: bool = False,
) -> Plan:
    """The plan with fewer neurons and heads that meets the budget; FFN widths are multiples of `round_to`.

    Without `damages` all layers are alike and come as near to the budget as they can: with both kinds reduced, heads
    take the fraction nearest to the one that all blocks have to give, never more than one head per group below it,
    and the FFN takes what is left. With them the least damage within the budget is chosen: among plans whose layers
    are alike in the stock tier, among all others. `reduce_embedding`: ranks of the vocabulary's ranges are chosen with
    them where their damages are known.

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
        ranges = []
        if reduce_embedding and len(damages.embedding):
            ranges = table_options(damages.embedding, shape.vocab_size)
        return _spread(shape, plan, budget, damages, step if reduce_ffn else None, ranges, reduce_heads=reduce_heads)
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
    shape: ModelShape,
    plan: Plan,
    budget: Budget,
    damages: Damages,
    step: int | None,
    ranges: list[list[TableShape]],
    *,
    reduce_heads: bool,
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
    whole = tuple(ranks[-1] for ranks in ranges)
    for index, ranks in enumerate(ranges):
        tables.append(damages.embedding[index, [table.rank for table in ranks]].numpy())
        plans = [replace(plan, embedding=(*whole[:index], table, *whole[index + 1 :])) for table in ranks]
        costs.append(np.array([budget.measure(option.stack(shape)) - total for option in plans]))
    chosen = least_damage(tables, costs, budget.target - total)
    if chosen is None:
        least = total + sum(float(cost.min()) for cost in costs)
        raise PlanError(
            f"The target is {budget.show(budget.target)}, but this recipe gets down to {budget.show(least)} at best; "
            "ask for a smaller --sparsity, or allow --heads id as well."
        )
    layers, blocks = list(plan.layers), chosen[: 2 * len(plan.kept_layers)]
    for layer, width, units in zip(plan.kept_layers, blocks[::2], blocks[1::2], strict=True):
        layers[layer] = LayerPlan(widths[width], **heads[units])
    embedding = tuple(ranks[chosen_rank] for ranks, chosen_rank in zip(ranges, chosen[len(blocks) :], strict=True))
    return replace(plan, layers=tuple(layers), embedding=() if embedding == whole else embedding)
