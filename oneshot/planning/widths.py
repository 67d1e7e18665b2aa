"""FFN neurons and heads for a budget: equal layers, or each layer's own sizes if damages are known."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from oneshot.errors import PlanError
from oneshot.families import RANKED_KINDS, ModelShape, RankedKind, TableShape
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
    ranked_kinds: Sequence[RankedKind] = (),
) -> Plan:
    """Return the plan with fewer neurons and heads that meets the budget; FFN widths are multiples of `round_to`.

    Without `damages` all layers are equal and come as near to the budget as possible. If both kinds are reduced, heads
    take the fraction nearest to the one that all sublayers must lose, and the FFN takes what is left. With `damages`
    the plan of least damage within the budget is chosen, among equal layers unless the form lets layers differ.
    `reduce_embedding`: ranks of the vocabulary's ranges are chosen together with these sizes. `leave_out_sublayers`:
    with damages, the sizes zero of an FFN and of attention also count. `reduce_inner`: with damages, each layer's sizes
    inside heads are also chosen if the form lets them differ. `ranked_kinds`: with damages, each layer's ranks of these
    linears are also chosen.

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
            ranked_kinds=ranked_kinds if grid.has_ranks and len(damages.ranks) else (),
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


def _ranks(shape: ModelShape, kind: RankedKind) -> list[int | None]:
    """Return the ranks of a linear, None for whole, in steps of about a sixteenth from a quarter of the hidden size.

    A profile measures what half of it costs.
    """
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    rows = {
        "query_key": (heads + shape.num_key_value_heads) * shape.head_dim,
        "output": heads * shape.head_dim,
        "gate": shape.intermediate_size,
        "up": shape.intermediate_size,
    }
    step = default_round_to(hidden)
    step *= max(1, hidden // (16 * step))
    return [*range(step * -(-hidden // (4 * step)), min(hidden, rows[kind]), step), None]


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
    ranked_kinds: Sequence[RankedKind] = (),
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
    stack = grid.family.stack
    # what an FFN and what attention may be: own sizes, and ranks of their linears
    sublayers = (
        _Options(grid, [{"intermediate_size": width} for width in widths], _of(stack.ffn.ranked_kinds, ranked_kinds)),
        _Options(grid, attention, _of(stack.attention.ranked_kinds, ranked_kinds)),
    )
    total = budget.measure(grid.stack(plan))
    tables: list[np.ndarray] = []
    costs: list[np.ndarray] = []
    chosen_from: list[np.ndarray] = []
    prices: list[np.ndarray] = []
    # the first options of heads that a layer does not have
    barred = {plan.kept_layers[0]: 1} if leaves_out and grid.first_layer_attends else {}
    for layer in plan.kept_layers:
        lost = damages.heads[layer, columns]
        if reduce_inner:
            of_sizes = damages.queries_keys[layer, [sizes.get("query_key_size", -1) for sizes in inner]]
            of_sizes = of_sizes + damages.values[layer, [sizes.get("value_size", -1) for sizes in inner]]
            lost = (lost.unsqueeze(1) + of_sizes).flatten()
        if leaves_out:
            lost = torch.cat((damages.heads[layer, :1], lost))
        if not prices or plan.hidden is not None:  # layers are equal unless the hidden size differs
            prices = [options.prices(plan, layer, budget) for options in sublayers]
        for options, own, price, first in zip(
            sublayers, (damages.ffn[layer, widths], lost), prices, (0, barred.get(layer, 0)), strict=True
        ):
            table = options.damages(own.numpy(), damages.ranks[layer] if ranked_kinds else damages.ranks)
            worth = first + _undominated(table[first:], price[first:])
            tables.append(table[worth])
            costs.append(price[worth])
            chosen_from.append(worth)
    whole = tuple(ranks[-1] for ranks in ranges)
    for index, ranks in enumerate(ranges):
        tables.append(damages.embedding[index, [table.rank for table in ranks]].numpy())
        plans = [replace(plan, embedding=(*whole[:index], table, *whole[index + 1 :])) for table in ranks]
        costs.append(np.array([budget.measure(grid.stack(option)) - total for option in plans]))
    chosen = least_damage(tables, costs, budget.target - total)
    if chosen is None:
        least = total + sum(float(cost.min()) for cost in costs)
        raise PlanError(
            f"The target is {budget.show(budget.target)}, but this recipe gets down to {budget.show(least)} at best; "
            "ask for a smaller --sparsity, or allow --set heads=id as well."
        )
    layers = list(plan.layers)
    blocks = [worth[index] for worth, index in zip(chosen_from, chosen, strict=False)]
    for layer, ffn, attends in zip(plan.kept_layers, blocks[::2], blocks[1::2], strict=True):
        layers[layer] = replace(layers[layer], **sublayers[0].sizes(ffn), **sublayers[1].sizes(attends))
    if not any(layer.num_attention_heads for layer in layers):
        raise PlanError("The target leaves no attention in any layer; ask for a smaller --sparsity.")
    embedding = tuple(ranks[rank] for ranks, rank in zip(ranges, chosen[len(blocks) :], strict=True))
    return replace(plan, layers=tuple(layers), embedding=() if embedding == whole else embedding)


def _of(kinds: Sequence[RankedKind], planned: Sequence[RankedKind]) -> list[RankedKind]:
    return [kind for kind in kinds if kind in planned]


class _Options:
    """List what a sublayer may be: each of its `own` sizes, with every combination of ranks of `kinds` of linears."""

    def __init__(self, grid: Grid, own: list[Sizes], kinds: Sequence[RankedKind]) -> None:
        self._grid, self._own, self._kinds = grid, own, kinds
        self._ranks = [_ranks(grid.shape, kind) for kind in kinds]
        self._shape = (len(own), *(len(ranks) for ranks in self._ranks))

    def sizes(self, option: int) -> Sizes:
        """Return the fields of an option."""
        own, *ranks = np.unravel_index(option, self._shape)
        chosen = zip(self._kinds, self._ranks, ranks, strict=True)
        return self._own[own] | {f"{kind}_rank": of_kind[rank] for kind, of_kind, rank in chosen}

    def damages(self, own: np.ndarray, of_ranks: torch.Tensor) -> np.ndarray:
        """Return the damage of every option from those of the own sizes, and `(kinds, D + 1)` of all ranks."""
        total = own
        for kind, ranks in zip(self._kinds, self._ranks, strict=True):
            lost = [0.0 if rank is None else float(of_ranks[RANKED_KINDS.index(kind), rank]) for rank in ranks]
            total = np.add.outer(total, lost)
        return total.ravel()

    def prices(self, plan: Plan, layer: int, budget: Budget) -> np.ndarray:
        """Return what every option adds to the budget's measure of the plan; what ranks of two linears add, adds up."""
        kept, stack, index = plan.layers[layer], self._grid.stack(plan), plan.kept_layers.index(layer)

        def measure(sizes: Sizes) -> float:
            layers = (*plan.layers[:layer], replace(kept, **sizes), *plan.layers[layer + 1 :])
            shape = self._grid.layer(replace(plan, layers=layers), layer)
            return budget.measure(replace(stack, layers=(*stack.layers[:index], shape, *stack.layers[index + 1 :])))

        own = np.array([measure(sizes) for sizes in self._own])
        total = own - budget.measure(stack)
        for number, (kind, ranks) in enumerate(zip(self._kinds, self._ranks, strict=True)):
            added = [
                [0.0 if rank is None else measure(sizes | {f"{kind}_rank": rank}) - alone for rank in ranks]
                for sizes, alone in zip(self._own, own, strict=True)
            ]
            total = np.expand_dims(total, -1) + np.expand_dims(np.array(added), tuple(range(1, number + 1)))
        return total.ravel()


def _undominated(damages: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return the indices of the options that no other beats in both, ascending by cost."""
    order = np.lexsort((damages, costs))
    best = np.minimum.accumulate(np.concatenate(([np.inf], damages[order][:-1])))
    return order[damages[order] < best]
