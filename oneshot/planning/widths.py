"""FFN neurons and heads for a budget: equal layers, or each layer's own sizes if damages are known."""

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from oneshot.errors import PlanError
from oneshot.families import ModelShape, TableShape
from oneshot.linalg.allocation import least_damage
from oneshot.planning.budget import Budget, default_round_to
from oneshot.planning.damages import Damages, predicted_damage
from oneshot.planning.grid import Grid
from oneshot.planning.plan import LayerPlan, Plan
from oneshot.planning.vocabulary import table_options

Sizes = dict[str, Any]  # fields of `LayerPlan`

NO_HEADS: Sizes = {"num_attention_heads": 0, "num_key_value_heads": 0, "query_key_size": None, "value_size": None}


def meet_budget(
    grid: Grid,
    plan: Plan,
    budget: Budget,
    *,
    reduce_ffn: bool,
    reduce_heads: bool,
    round_to: int | None,
    damages: Damages | None = None,
    reduce_embedding: bool = False,
    leave_out_sublayers: bool = False,
    reduce_inner: bool = False,
    reduce_ranks: bool = False,
) -> Plan:
    """Return the plan with fewer neurons and heads that meets the budget; FFN widths are multiples of `round_to`.

    Without `damages` all layers are equal and come as near to the budget as possible. If both kinds are reduced, heads
    take the fraction nearest to the one that all sublayers must lose, and the FFN takes what is left. With `damages`
    the plan of least damage within the budget is chosen, among equal layers unless the form lets layers differ.
    `reduce_embedding`: ranks of the vocabulary's ranges are chosen together with these sizes. `leave_out_sublayers`:
    with damages, the sizes zero of an FFN and of attention also count. `reduce_inner`: with damages, each layer's sizes
    inside heads are also chosen if the form lets them differ. `reduce_ranks`: and so are ranks of attention's linears.

    Args:
        plan: what is decided already, with all neurons and heads.

    Raises `PlanError` if nothing may be reduced or the budget is out of reach.
    """
    shape = grid.shape
    surplus = budget.measure(grid.stack(plan)) - budget.target
    if surplus == 0:
        return plan
    leaves_out = leave_out_sublayers and damages is not None
    if not (reduce_ffn or reduce_heads or leaves_out):
        raise PlanError("Nothing may be reduced (ffn=none, heads=none); allow one with --set, or ask for --sparsity 0.")
    step = round_to or default_round_to(shape.intermediate_size)
    if reduce_ffn and step > shape.intermediate_size:
        raise PlanError(f"--round-to {step} is above the FFN width of {shape.intermediate_size}; give a smaller one.")
    if reduce_heads and (reason := grid.reason_against_heads()) is not None:
        raise PlanError(reason)
    if damages is not None and grid.layers_differ:
        ranges = []
        if reduce_embedding and len(damages.embedding):
            ranges = table_options(damages.embedding, shape.vocab_size)
        widths_step = step if reduce_ffn else None
        if reduce_heads and not grid.heads_differ:
            return _spread_with_equal_heads(grid, plan, budget, damages, widths_step, leaves_out=leaves_out)
        return _spread(
            grid,
            plan,
            budget,
            damages,
            widths_step,
            ranges,
            reduce_heads=reduce_heads,
            leaves_out=leaves_out,
            reduce_inner=reduce_inner and grid.inner_sizes_differ,
            reduce_ranks=reduce_ranks and len(damages.output_ranks) > 0,
        )
    if not reduce_heads:
        return _with_width(grid, plan, budget, step)
    options = _head_options(shape, plan)
    if not reduce_ffn:
        return _nearest_heads(grid, plan, options, budget, surplus)
    if damages is not None:
        return _least_damage(grid, options, budget, damages, step)
    fraction = surplus / sum(layer.parameters() for layer in grid.stack(plan).layers)
    kept = max(1, len(options) - round(fraction * len(options)))
    # one head may be more than is asked for if attention outweighs the FFN; all heads remove nothing
    fitting = (option for option in options[kept - 1 :] if budget.measure(grid.stack(option)) >= budget.target)
    return _with_width(grid, next(fitting), budget, step)


def _alike(plan: Plan, **sizes: int) -> Plan:
    """Return the plan with these sizes in every layer that stays."""
    return replace(plan, layers=tuple(kept if kept.is_left_out else replace(kept, **sizes) for kept in plan.layers))


def _head_sizes(shape: ModelShape, head_unit: str) -> list[Sizes]:
    """Return the heads for every number of kept units, from one to all."""
    groups, per_group = shape.num_key_value_heads, shape.heads_per_group
    if head_unit == "kv-group":
        kept = [(units * per_group, units) for units in range(1, groups + 1)]
    else:
        kept = [(units * groups, groups) for units in range(1, per_group + 1)]
    return [{"num_attention_heads": heads, "num_key_value_heads": left} for heads, left in kept]


def _inner_sizes(grid: Grid) -> list[Sizes]:
    """Return the sizes of queries and keys with those of values, in steps down to half; one that is not given is whole.

    A profile measures sensitivities at three quarters, and they were not checked below half. Rotary pairs stay
    whole, and so do the queries and keys of a family that cannot have smaller ones.
    """
    size = grid.shape.head_dim
    step = default_round_to(size)
    pair = 2 if grid.family.stack.rotary else 1
    scores_shrink = grid.family.reason_against("queries and keys") is None
    scores = (
        [{"query_key_size": kept} for kept in range(pair * -(-size // (2 * pair)), size, max(pair, step))]
        if scores_shrink
        else []
    )
    values = [{"value_size": kept} for kept in range(-(-size // 2), size, step)]
    return [score | value for score in ({}, *scores) for value in ({}, *values)]


def _ranks(errors: torch.Tensor) -> list[int | None]:
    """Return the ranks of a linear with these `errors (layers, n + 1)`, in steps from a quarter of n; None for whole.

    A profile measures sensitivities at half of it.
    """
    full = errors.shape[1] - 1
    step = default_round_to(full)
    return [*range(step * -(-full // (4 * step)), full, step), None]


def _heads_of(kept: LayerPlan) -> Sizes:
    return {"num_attention_heads": kept.num_attention_heads, "num_key_value_heads": kept.num_key_value_heads}


def _head_options(shape: ModelShape, plan: Plan) -> list[Plan]:
    """Return the plans with one head unit in every layer, with two, up to all."""
    return [_alike(plan, **sizes) for sizes in _head_sizes(shape, plan.head_unit)]


def _nearest_heads(grid: Grid, plan: Plan, options: list[Plan], budget: Budget, surplus: float) -> Plan:
    """Return the plan whose number of heads comes nearest to the budget."""
    most = budget.measure(grid.stack(plan)) - budget.measure(grid.stack(options[0]))
    if surplus > most:
        raise PlanError(
            f"Heads alone can give up {budget.show(most)} of the {budget.show(surplus)} asked for; "
            "ask for less or allow --set ffn=id."
        )
    return min(options, key=lambda option: abs(budget.measure(grid.stack(option)) - budget.target))


def _with_width(grid: Grid, plan: Plan, budget: Budget, step: int) -> Plan:
    """Return the plan whose equal FFN widths, multiples of `step`, come nearest to the budget."""
    width = grid.shape.intermediate_size
    widths = [*range(step, width, step), width]
    options = [_alike(plan, intermediate_size=width) for width in widths]
    measures = [budget.measure(grid.stack(option)) for option in options]
    if budget.target < measures[0] - (measures[1] - measures[0] if len(measures) > 1 else 0) / 2:
        raise PlanError(
            f"The target is {budget.show(budget.target)}, but this recipe gets down to {budget.show(measures[0])} at "
            "best; ask for a smaller --sparsity, or allow --set heads=id as well."
        )
    return min(zip(options, measures, strict=True), key=lambda pair: abs(pair[1] - budget.target))[0]


def _least_damage(grid: Grid, options: list[Plan], budget: Budget, damages: Damages, step: int) -> Plan:
    """Return the plan of least damage among all numbers of heads, each with the FFN width that meets the budget."""
    fitting = []
    for option in options:
        if budget.measure(grid.stack(option)) >= budget.target:
            with contextlib.suppress(PlanError):
                fitting.append(_with_width(grid, option, budget, step))
    if not fitting:
        raise PlanError(
            f"No FFN width and no number of heads reaches {budget.target:,.0f} {budget.unit}; ask for more."
        )
    return min(fitting, key=lambda plan: predicted_damage(plan, grid.shape, damages))


def _spread_with_equal_heads(
    grid: Grid, plan: Plan, budget: Budget, damages: Damages, step: int | None, *, leaves_out: bool
) -> Plan:
    """Return the plan of least damage whose layers have their own FFN widths and all the same heads, or none."""
    if step is None:
        raise PlanError(
            "This form has the same heads in every layer, so a profile has nothing to share out; allow --set ffn=id, "
            "or add --set allocation=uniform."
        )
    plans, refusal = [], None
    for option in _head_options(grid.shape, plan):
        if budget.measure(grid.stack(option)) < budget.target:
            continue
        try:
            plans.append(_spread(grid, option, budget, damages, step, [], reduce_heads=False, leaves_out=leaves_out))
        except PlanError as error:
            refusal = error  # the last one is with all heads
    if not plans:
        assert refusal is not None
        raise refusal
    return min(plans, key=lambda plan: predicted_damage(plan, grid.shape, damages))


def _spread(
    grid: Grid,
    plan: Plan,
    budget: Budget,
    damages: Damages,
    step: int | None,
    ranges: list[list[TableShape]],
    *,
    reduce_heads: bool,
    leaves_out: bool = False,
    reduce_inner: bool = False,
    reduce_ranks: bool = False,
) -> Plan:
    """Return each layer's own sizes with the least sum of damages within the budget (`linalg.allocation`)."""
    shape = grid.shape
    widths = [shape.intermediate_size]
    if step is not None:
        widths = [*range(step, shape.intermediate_size, step), shape.intermediate_size]
    units = _head_sizes(shape, plan.head_unit)
    heads = [kept for kept in units if reduce_heads or kept == _heads_of(plan.layers[plan.kept_layers[0]])]
    columns = [units.index(kept) - len(units) for kept in heads]  # from the end, where all units stay
    inner = _inner_sizes(grid) if reduce_inner else [Sizes()]
    attention = [kept | sizes for kept in heads for sizes in inner]
    if leaves_out:
        widths, attention = [0, *widths], [NO_HEADS, *attention]
    linears = (
        [("query_key_rank", damages.query_key_ranks), ("output_rank", damages.output_ranks)] if reduce_ranks else []
    )
    ranks = [(name, of_linear, _ranks(of_linear)) for name, of_linear in linears]
    kinds = [
        [{"intermediate_size": width} for width in widths],
        attention,
        *([{name: rank} for rank in options] for name, _, options in ranks),
    ]
    total = budget.measure(grid.stack(plan))
    tables: list[np.ndarray] = []
    costs: list[np.ndarray] = []
    prices: list[np.ndarray] = []
    # the first options of heads that a layer does not have
    barred = {plan.kept_layers[0]: 1} if leaves_out and grid.first_layer_attends else {}
    for layer in plan.kept_layers:
        kept = plan.layers[layer]
        lost = damages.heads[layer, columns]
        if reduce_inner:
            of_sizes = damages.queries_keys[layer, [sizes.get("query_key_size", -1) for sizes in inner]]
            of_sizes = of_sizes + damages.values[layer, [sizes.get("value_size", -1) for sizes in inner]]
            lost = (lost.unsqueeze(1) + of_sizes).flatten()
        if leaves_out:
            lost = torch.cat((damages.heads[layer, :1], lost))
        tables += [damages.ffn[layer, widths].numpy(), lost[barred.get(layer, 0) :].numpy()]
        tables += [of_linear[layer, [rank or -1 for rank in options]].numpy() for _, of_linear, options in ranks]
        if not prices or plan.hidden is not None:  # layers are equal unless the hidden size differs
            before, after = plan.layers[:layer], plan.layers[layer + 1 :]
            prices = []
            for choices in kinds:
                smaller = [replace(plan, layers=(*before, replace(kept, **choice), *after)) for choice in choices]
                prices.append(np.array([budget.measure(grid.stack(option)) - total for option in smaller]))
        costs += [prices[0], prices[1][barred.get(layer, 0) :], *prices[2:]]
    whole = tuple(options[-1] for options in ranges)
    for index, of_range in enumerate(ranges):
        tables.append(damages.embedding[index, [table.rank for table in of_range]].numpy())
        plans = [replace(plan, embedding=(*whole[:index], table, *whole[index + 1 :])) for table in of_range]
        costs.append(np.array([budget.measure(grid.stack(option)) - total for option in plans]))
    chosen = least_damage(tables, costs, budget.target - total)
    if chosen is None:
        least = total + sum(float(cost.min()) for cost in costs)
        raise PlanError(
            f"The target is {budget.show(budget.target)}, but this recipe gets down to {budget.show(least)} at best; "
            "ask for a smaller --sparsity, or allow --set heads=id as well."
        )
    layers = list(plan.layers)
    of_layers, of_ranges = np.split(chosen, [len(kinds) * len(plan.kept_layers)])
    for layer, indices in zip(plan.kept_layers, of_layers.reshape(-1, len(kinds)), strict=True):
        indices[1] += barred.get(layer, 0)
        for choices, index in zip(kinds, indices, strict=True):
            layers[layer] = replace(layers[layer], **choices[index])
    if not any(layer.num_attention_heads for layer in layers):
        raise PlanError("The target leaves no attention in any layer; ask for a smaller --sparsity.")
    embedding = tuple(of_range[index] for of_range, index in zip(ranges, of_ranges, strict=True))
    return replace(plan, layers=tuple(layers), embedding=() if embedding == whole else embedding)
