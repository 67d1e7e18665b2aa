"""Sizes of its own for every layer: what each sublayer may be, and the choice of least predicted damage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from oneshot.architecture import RANKED_KINDS, LayerShape, ModelShape, RankedKind, TableShape
from oneshot.errors import PlanError
from oneshot.linalg.allocation import least_damage
from oneshot.planning.budget import Budget, OutOfReachError, default_round_to
from oneshot.planning.damages import Damages, predicted_damage
from oneshot.planning.experts import expert_counts
from oneshot.planning.grid import Grid
from oneshot.planning.heads import Sizes, head_options, head_sizes
from oneshot.planning.plan import LayerPlan, Plan, RemovedUnit
from oneshot.planning.serving import Half, MisfitError
from oneshot.planning.vocabulary import table_options
from oneshot.serving import ANY

Ranks = dict[RankedKind, list[int | None]]  # that linears of a kind may have; None: whole
NO_HEADS: Sizes = {"num_attention_heads": 0, "num_key_value_heads": 0, "query_key_size": None, "value_size": None}


def spread(
    grid: Grid,
    plan: Plan,
    budget: Budget,
    damages: Damages,
    step: int | None,
    *,
    reduce_heads: bool,
    leaves_out: bool = False,
    reduce_embedding: bool = False,
    reduce_inner: bool = False,
    ranked_kinds: Sequence[RankedKind] = (),
    round_ranks_to: int | None = None,
    reduce_experts: bool = False,
) -> Plan:
    """Return each layer's own sizes with the least sum of damages within the budget (`linalg.allocation`).

    Args:
        step: between FFN widths; None for whole FFNs. round_ranks_to: ranks are multiples of it; None: of what suits
            the hidden size. The others: see `widths.meet_budget`.

    Raises `PlanError` if the budget is out of reach, or leaves no attention.
    """
    stays = _Options(grid, [{}], torch.zeros(len(plan.layers), 1), {})
    ffns, mixers = [stays] * len(plan.layers), [stays] * len(plan.layers)  # carried mixers stay
    dense = grid.family.dense_layers
    may_attend = [layer for layer in plan.kept_layers if layer not in grid.kept.attention]
    attending = [layer for layer in may_attend if grid.family.stack_of(layer).attentions]
    alike: dict[ModelShape, list[int]] = {}
    for layer in range(len(plan.layers)):
        alike.setdefault(grid.shape.of(layer), []).append(layer)
    for shape, numbers in alike.items():
        ranks = {kind: rank_options(shape, kind, round_ranks_to) for kind in ranked_kinds}
        ffn = _ffn_options(grid, shape, damages, step, ranks, leaves_out=leaves_out, reduce_experts=reduce_experts)
        for layer in numbers:
            if layer not in dense and layer not in grid.kept.ffn:
                ffns[layer] = ffn
        of_shape = [layer for layer in numbers if layer in attending]
        if not of_shape:
            continue
        attention, unranked = (
            _attention_options(
                grid,
                shape,
                plan.layers[of_shape[0]],
                plan.head_unit,
                damages,
                offered,
                reduce_heads=reduce_heads,
                leaves_out=leaves_out,
                reduce_inner=reduce_inner,
            )
            for offered in (ranks, Ranks())
        )
        for layer in of_shape:  # what ranks cost is measured by the FFN that shrinks beside them
            mixers[layer] = unranked if layer in dense else attention
    ranges = []
    if reduce_embedding and len(damages.embedding):
        ranges = table_options(damages.embedding, grid.shape.vocab_size)
    items = [
        *_sublayer_items(grid, plan, budget, damages, ffns, mixers, leaves_out=leaves_out),
        *_embedding_items(grid, plan, budget, damages, ranges),
    ]
    total = budget.measure(grid.stack(plan))
    chosen = least_damage([item.damages for item in items], [item.costs for item in items], budget.target - total)
    if chosen is None:
        least = total + sum(float(item.costs.min()) for item in items)
        raise OutOfReachError(budget, least)
    options = (int(item.options[index]) for item, index in zip(items, chosen, strict=True))
    layers = list(plan.layers)
    for layer in plan.kept_layers:
        layers[layer] = replace(layers[layer], **ffns[layer].sizes(next(options)), **mixers[layer].sizes(next(options)))
    if not any(layers[layer].num_attention_heads for layer in plan.kept_layers if grid.family.attends(layer)):
        raise PlanError("The target leaves no attention in any layer; ask for a smaller --sparsity.")
    embedding = tuple(ranks[option] for ranks, option in zip(ranges, options, strict=True))
    whole = tuple(ranks[-1] for ranks in ranges)
    return replace(plan, layers=tuple(layers), embedding=() if embedding == whole else embedding)


def worth_trying(grid: Grid, options: Sequence[Plan], budget: Budget) -> list[Plan]:
    """Return the options from the largest one below the budget on; fewer heads than in that one only do more damage.

    `options`: by rising size, with all neurons.
    """
    below = [option for option in options if budget.measure(grid.stack(option)) < budget.target]
    return list(options[max(0, len(below) - 1) :])


def spread_with_equal_heads(
    grid: Grid, plan: Plan, budget: Budget, damages: Damages, step: int | None, *, leaves_out: bool
) -> Plan:
    """Return the plan of least damage whose layers have their own FFN widths and all the same heads, or none."""
    if step is None:
        raise PlanError(
            "This form has the same heads in every layer, so a profile has nothing to share out; allow --set ffn=id, "
            "or add --set allocation=uniform."
        )
    plans, refusal = [], None
    for option in worth_trying(grid, grid.servable(head_options(grid.shape, plan), "attention"), budget):
        try:
            plans.append(spread(grid, option, budget, damages, step, reduce_heads=False, leaves_out=leaves_out))
        except PlanError as error:
            refusal = error  # the last one is with all heads
    if not plans:
        assert refusal is not None
        raise refusal
    return min(plans, key=lambda plan: predicted_damage(plan, grid.shape, damages))


@dataclass(frozen=True)
class _Item:
    """List what one sublayer or one range of the embedding may be, without what another option beats in both.

    `options`: their numbers. `damages`, `costs`: in nats per token, and in the budget's unit. All are `(options,)`.
    """

    options: np.ndarray
    damages: np.ndarray
    costs: np.ndarray


def _item(damages: np.ndarray, costs: np.ndarray, first: int = 0) -> _Item:
    """Return the options, from the `first` on, that no other beats in both, ascending by cost."""
    order = first + np.lexsort((damages[first:], costs[first:]))
    best = np.minimum.accumulate(np.concatenate(([np.inf], damages[order][:-1])))
    worth = order[damages[order] < best]
    return _Item(worth, damages[worth], costs[worth])


def _sublayer_items(
    grid: Grid,
    plan: Plan,
    budget: Budget,
    damages: Damages,
    ffns: Sequence["_Options"],
    mixers: Sequence["_Options"],
    *,
    leaves_out: bool,
) -> list[_Item]:
    """Return what the FFN and the mixer before it may be in every layer, layer by layer; both are by layer."""
    items: list[_Item] = []
    # equal layers of equal options have equal ones
    prices: dict[tuple[LayerShape, _Options, _Options], tuple[np.ndarray, ...]] = {}
    for layer in plan.kept_layers:
        ffn, mixer = ffns[layer], mixers[layer]
        alike = grid.layer(plan, layer), ffn, mixer
        if alike not in prices:
            misfits = ffn.misfits(plan, layer, "ffn"), mixer.misfits(plan, layer, "attention")
            prices[alike] = ffn.prices(plan, layer, budget), mixer.prices(plan, layer, budget), *misfits
        ffn_costs, mixer_costs, ffn_misfits, mixer_misfits = prices[alike]
        must_attend = leaves_out and grid.first_layer_attends and not items
        if np.isinf(mixer_misfits[int(must_attend) :]).all():
            raise MisfitError(grid.misfit_sentence(plan, "attention"))
        items.append(_item(ffn.damages(layer, damages.ranks) + ffn_misfits, ffn_costs))
        items.append(_item(mixer.damages(layer, damages.ranks) + mixer_misfits, mixer_costs, first=int(must_attend)))
    return items


def _embedding_items(
    grid: Grid, plan: Plan, budget: Budget, damages: Damages, ranges: list[list[TableShape]]
) -> list[_Item]:
    """Return what every range of the embedding may be."""
    stack, whole = grid.stack(plan), tuple(ranks[-1] for ranks in ranges)
    total, items = budget.measure(stack), []
    for index, ranks in enumerate(ranges):
        stacks = [replace(stack, embedding=(*whole[:index], table, *whole[index + 1 :])) for table in ranks]
        costs = np.array([budget.measure(option) - total for option in stacks])
        items.append(_item(damages.embedding[index, [table.rank for table in ranks]].numpy(), costs))
    return items


def _ffn_options(
    grid: Grid,
    shape: ModelShape,
    damages: Damages,
    step: int | None,
    ranks: Ranks,
    *,
    leaves_out: bool,
    reduce_experts: bool,
) -> "_Options":
    """Return the widths of an FFN of this shape, nothing first if it may be left out, and the ranks of its linears.

    An FFN that is a mixture may also have fewer experts; what both lose adds up.
    """
    width = shape.intermediate_size
    widths = [width] if step is None else [*range(step, width, step), width]
    if leaves_out:
        widths = [0, *widths]
    sizes: list[Sizes] = [{"intermediate_size": width} for width in widths]
    lost = damages.ffn[:, widths]
    if reduce_experts:
        assert shape.experts is not None
        counts = expert_counts(shape.experts, grid.serving.tp)
        sizes = [size | {"num_experts": count} for size in sizes for count in counts]
        lost = (lost.unsqueeze(2) + damages.experts[:, counts].unsqueeze(1)).flatten(1)
    of_ffn = grid.family.stack.feed_forward.ranked
    return _Options(grid, sizes, lost, {kind: ranks[kind] for kind in of_ffn if kind in ranks})


def _attention_options(
    grid: Grid,
    shape: ModelShape,
    kept: LayerPlan,
    head_unit: RemovedUnit,
    damages: Damages,
    ranks: Ranks,
    *,
    reduce_heads: bool,
    leaves_out: bool,
    reduce_inner: bool,
) -> "_Options":
    """Return the heads of attention, nothing first if it may be left out, sizes inside them, and ranks of linears.

    `shape`: of the layers that have these options, and `kept`: their plan.
    """
    units = head_sizes(shape, head_unit)
    present = {"num_attention_heads": kept.num_attention_heads, "num_key_value_heads": kept.num_key_value_heads}
    sizes = units if reduce_heads else [present]
    lost = damages.heads[:, [units.index(heads) + 1 for heads in sizes]]
    if reduce_inner:
        inner = inner_sizes(grid)
        of_inner = damages.queries_keys[:, [inside.get("query_key_size", -1) for inside in inner]]
        of_inner = of_inner + damages.values[:, [inside.get("value_size", -1) for inside in inner]]
        lost = (lost.unsqueeze(2) + of_inner.unsqueeze(1)).flatten(1)
        sizes = [heads | inside for heads in sizes for inside in inner]
    if leaves_out:
        lost = torch.cat((damages.heads[:, :1], lost), 1)
        sizes = [NO_HEADS, *sizes]
    of_attention = grid.family.stack.attention.ranked
    return _Options(grid, sizes, lost, {kind: ranks[kind] for kind in of_attention if kind in ranks})


def inner_sizes(grid: Grid) -> list[Sizes]:
    """Return every pair of a query/key size and a value size, from half the head size up; None is the full size.

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


def rank_options(shape: ModelShape, kind: RankedKind, round_to: int | None) -> list[int | None]:
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
    step = round_to or default_round_to(hidden)
    step *= max(1, hidden // (16 * step))
    return [*range(step * -(-hidden // (4 * step)), min(hidden, rows[kind]), step), None]


class _Options:
    """List what a sublayer may be: each of its `own` sizes, with every combination of `ranks` of linears.

    `lost (layers, own)` is the damage of the own sizes in every layer.
    """

    def __init__(self, grid: Grid, own: list[Sizes], lost: torch.Tensor, ranks: Ranks) -> None:
        self._grid, self._own, self._lost, self._kinds = grid, own, lost, tuple(ranks)
        self._ranks = list(ranks.values())
        self._shape = (len(own), *(len(ranks) for ranks in self._ranks))
        self._all = tuple(tuple(sizes.items()) for sizes in own), tuple((kind, *ranks[kind]) for kind in ranks)

    def sizes(self, option: int) -> Sizes:
        """Return the fields of an option."""
        own, *ranks = np.unravel_index(option, self._shape)
        chosen = zip(self._kinds, self._ranks, ranks, strict=True)
        return self._own[own] | {f"{kind}_rank": of_kind[rank] for kind, of_kind, rank in chosen}

    def damages(self, layer: int, of_ranks: torch.Tensor) -> np.ndarray:
        """Return the damage of every option in a layer, `(options,)`, by `Damages.ranks`."""
        total = self._lost[layer].numpy()
        for kind, ranks in zip(self._kinds, self._ranks, strict=True):
            number = RANKED_KINDS.index(kind)
            lost = [0.0 if rank is None else float(of_ranks[layer, number, rank]) for rank in ranks]
            total = np.add.outer(total, lost)
        return total.ravel()

    def misfits(self, plan: Plan, layer: int, half: Half) -> np.ndarray:
        """Return zero for every option that can be served, and infinity for the others, `(options,)`.

        Raises `MisfitError` if no option can.
        """
        grid = self._grid
        if grid.serving == ANY:
            return np.zeros(math.prod(self._shape))
        names, found = [f"{kind}_rank" for kind in self._kinds], []
        for sizes in self._own:
            kept = replace(plan.layers[layer], **sizes)
            whole = grid.layer(replace(plan, layers=(*plan.layers[:layer], kept, *plan.layers[layer + 1 :])), layer)
            for ranks in product(*self._ranks):
                own: dict[str, Any] = {name: rank or 0 for name, rank in zip(names, ranks, strict=True)}
                found.append(math.inf if grid.misfit(layer, replace(whole, **own), half) else 0.0)
        if all(found):
            raise MisfitError(grid.misfit_sentence(plan, half))
        return np.array(found)

    def prices(self, plan: Plan, layer: int, budget: Budget) -> np.ndarray:
        """Return what every option adds to the budget's measure of the plan; what ranks of two linears add, adds up."""
        known, asked = self._grid.known_prices, (self._all, plan, layer, budget.measure)
        if asked not in known:
            known[asked] = self._measured(plan, layer, budget)
        return known[asked]

    def _measured(self, plan: Plan, layer: int, budget: Budget) -> np.ndarray:
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
