"""Sizes of its own for every layer: what each sublayer may be, and the choice of least predicted damage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, product
from math import inf, prod
from typing import Any

import numpy as np
import torch

from oneshot.architecture import Attention, Experts, FeedForward, LayerShape, ModelShape, Table, TableShape
from oneshot.errors import PlanError
from oneshot.linalg.allocation import least_damage
from oneshot.planning.budget import OutOfReachError
from oneshot.planning.damages import damage_of_tables, sums_of_ranges
from oneshot.planning.options import Fields, expert_counts, head_sizes, inner_sizes, rank_options
from oneshot.planning.plan import Plan
from oneshot.planning.problem import Problem
from oneshot.planning.serving import Half, MisfitError
from oneshot.planning.vocabulary import table_options
from oneshot.serving import ANY

HALVES: tuple[Half, Half] = ("ffn", "attention")
Prices = dict[Table, torch.Tensor]  # what ranks of ranges of the vocabulary lose, of the tables that have ranges
Choice = tuple[list[Fields], np.ndarray]  # what it may be, and the damage of each in every layer, `(layers, members)`
HALVINGS = 5  # between two prices of a table
NO_HEADS: Fields = {"num_attention_heads": 0, "num_key_value_heads": 0, "query_key_size": None, "value_size": None}


@dataclass(frozen=True)
class Item:
    """List what one sublayer, or one range of the vocabulary, may be, without what another option beats in both.

    An option is one member of each of the `choices`, and has a number in their product (`numbers`). `damages` are in
    nats per token, `costs` in the budget's unit above the plan; all three are `(options,)`, ascending by cost.
    """

    choices: Sequence[Sequence[Any]]
    numbers: np.ndarray
    damages: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(cls, choices: Sequence[Sequence[Any]], damages: np.ndarray, costs: np.ndarray) -> "Item":
        """Return the item without its worse options; `damages`, `costs`: of the whole product of the choices."""
        order = np.lexsort((damages, costs))
        best = np.minimum.accumulate(np.concatenate(([inf], damages[order][:-1])))
        worth = order[damages[order] < best]
        return cls(choices, worth, damages[worth], costs[worth])

    def members(self, option: int) -> list[Any]:
        """Return the member of every choice."""
        places = np.unravel_index(self.numbers[option], [len(choice) for choice in self.choices])
        return [choice[place] for choice, place in zip(self.choices, places, strict=True)]


@dataclass(frozen=True)
class Ranges:
    """List what every range of the vocabulary of a table may be, and its cost in the budget's unit above the plan."""

    options: Sequence[Sequence[TableShape]]
    costs: Sequence[np.ndarray]

    def items(self, lost: torch.Tensor) -> list[Item]:
        """Return an item of every range at a price: `lost (ranges, D + 1)` by rank."""
        damages = [row[[one.rank for one in tables]].numpy() for row, tables in zip(lost, self.options, strict=True)]
        return [Item.of([tables], *one) for tables, *one in zip(self.options, damages, self.costs, strict=True)]


@dataclass(frozen=True)
class Solution:
    """State the members of least damage at `prices`, of sublayers before ranges, and what they truly lose together."""

    prices: Prices
    members: Sequence[Sequence[Any]]
    tables: dict[Table, tuple[TableShape, ...]]
    damage: float


def with_own_sizes(problem: Problem, plan: Plan, filled: frozenset[int] = frozenset()) -> Plan:
    """Return each layer's own sizes with the least sum of damages within the budget (`linalg.allocation`).

    As many layers stay as a pipeline has stages: where too few would, those whose FFNs cost most keep a part of these.
    `filled`: layers that do.

    Raises `OutOfReachError` if the budget is out of reach, `PlanError` if it leaves no attention.
    """
    grid, budget, total = problem.grid, problem.budget, problem.measure(plan)
    # 1. What every sublayer of every layer, and every range of the vocabulary, may be
    sublayers, ranges = _sublayer_items(problem, plan, filled), _ranges(problem, plan)
    halves, left = [*sublayers.values()], budget.target - total

    def items_at(prices: Prices) -> list[Item]:
        return [*halves, *chain.from_iterable(ranges[table].items(lost) for table, lost in prices.items())]

    def solved(prices: Prices) -> Solution | None:
        items = items_at(prices)
        chosen = least_damage([item.damages for item in items], [item.costs for item in items], left)
        if chosen is None:
            return None
        members = [item.members(option) for item, option in zip(items, chosen, strict=True)]
        of_ranges = iter(members[len(halves) :])
        tables = {table: tuple(next(of_ranges)[0] for _ in ranges[table].costs) for table in prices}
        lost = sum(float(item.damages[option]) for item, option in zip(halves, chosen, strict=False))
        return Solution(prices, members, tables, lost + damage_of_tables(tables, problem.known_damages))

    # 2. One option of each, at every price of every table, or with the whole table; then between prices
    lines = [[None, *problem.known_damages[table]] for table in ranges]
    several: list[Prices] = [
        {table: lost for table, lost in zip(ranges, of_tables, strict=True) if lost is not None}
        for of_tables in product(*lines)
    ]
    found = [one for one in map(solved, several) if one is not None]
    if not found:
        least = min(sum(float(item.costs.min()) for item in items_at(prices)) for prices in several)
        raise OutOfReachError(budget, total + least)
    best = min(found, key=lambda one: one.damage)
    for table in best.prices:
        best = _between_prices(best, table, problem.known_damages[table], solved)
    # 3. The plan that states them
    layers = list(plan.layers)
    for (layer, _), of_choices in zip(sublayers, best.members, strict=False):
        layers[layer] = replace(layers[layer], **reduce(dict.__or__, of_choices))
    if not any(layers[layer].num_attention_heads for layer in plan.kept_layers if grid.family.attends(layer)):
        raise PlanError("The target leaves no attention in any layer; ask for a smaller --sparsity.")
    gone = sorted(
        (layer for layer in plan.kept_layers if layers[layer].is_left_out),
        key=lambda layer: float(problem.known_damages["ffn"][layer, 0]),
    )
    lacking = grid.serving.pp - (len(plan.kept_layers) - len(gone))
    if gone and lacking > 0:
        return with_own_sizes(problem, plan, filled.union(gone[-lacking:]))
    tables = best.tables
    return replace(
        plan, layers=tuple(layers), embedding=tables.get("embedding", ()), output_head=tables.get("output_head", ())
    )


def _between_prices(
    best: Solution, table: Table, lines: torch.Tensor, solved: Callable[[Prices], Solution | None]
) -> Solution:
    """Return the solution of least damage at weighted means of two prices of a table, or `best`.

    A table costs the largest of its sums at all `lines (prices, ranges, D + 1)`. If that is not the one at the price
    that `best` is for, the best ranks are nearly those at which the two are equal.
    """
    start, own = best.prices, best.prices[table]
    other = lines[int(sums_of_ranges(lines, best.tables[table]).argmax())]
    both = torch.stack((own, other))

    def is_beyond(solution: Solution) -> bool:
        of_own, of_other = sums_of_ranges(both, solution.tables[table]).tolist()
        return bool(of_other > of_own)

    if not is_beyond(best):
        return best
    low, high = 0.0, 1.0  # of the other price's weight
    for _ in range(HALVINGS):
        weight = (low + high) / 2
        found = solved(start | {table: torch.lerp(own, other, weight)})
        assert found is not None, "what options cost does not depend on the price"
        best = min(best, found, key=lambda one: one.damage)
        low, high = (weight, high) if is_beyond(found) else (low, weight)
    return best


def _sublayer_items(problem: Problem, plan: Plan, filled: frozenset[int]) -> dict[tuple[int, Half], Item]:
    """Return what the FFN and the mixer of every layer that stays may be, in the order of layers."""
    grid, family = problem.grid, problem.grid.family
    known = grid.known_costs.setdefault((plan, problem.budget.measure), {})
    first = plan.kept_layers[0] if grid.first_layer_attends else None
    # 1. Equal layers of equal plans have the same options at the same costs
    alike: dict[Any, list[int]] = {}
    for layer in plan.kept_layers:
        shapes, attends = (grid.shape.of(layer), grid.layer(plan, layer)), bool(family.stack_of(layer).attentions)
        stays = layer in family.dense_layers, layer in grid.kept.ffn, layer in grid.kept.attention, layer in filled
        alike.setdefault((shapes, attends, stays, layer == first), []).append(layer)
    # 2. What they lose, each layer has of its own
    items: dict[tuple[int, Half], Item] = {}
    for layer, *others in alike.values():
        of_halves: dict[Half, list[Choice]] = {
            "ffn": _ffn_choices(problem, plan, layer, must_stay=layer in filled),
            "attention": _attention_choices(problem, plan, layer, must_attend=layer == first),
        }
        for half, of_half in of_halves.items():
            choices, lost = zip(*of_half, strict=True)
            misfits, asked = _misfits(problem, plan, layer, half, choices), (layer, repr(choices))
            if asked not in known:
                known[asked] = _costs(problem, plan, layer, choices)
            for one in (layer, *others):
                damages = reduce(np.add.outer, (of_choice[one] for of_choice in lost)).ravel()
                items[one, half] = Item.of(choices, damages + misfits, known[asked])
    return {(layer, half): items[layer, half] for layer in plan.kept_layers for half in HALVES}


def _ranges(problem: Problem, plan: Plan) -> dict[Table, Ranges]:
    """Return what every range of the vocabulary may be, of the tables that can have some, if its damages are known."""
    tables = [table for table in problem.reduced_tables if table in problem.known_damages]
    return {table: _ranges_of(problem, plan, table) for table in tables}


def _ranges_of(problem: Problem, plan: Plan, name: Table) -> Ranges:
    ranges = table_options(problem.known_damages[name][0], problem.grid.shape.vocab_size)
    measure, stack, whole = problem.budget.measure, problem.grid.stack(plan), [one[-1] for one in ranges]

    def measured(tables: Sequence[TableShape]) -> float:
        reduced: dict[str, Any] = {name: tuple(tables)}
        return measure(replace(stack, **reduced))

    total = measured(whole)
    places = (total - measure(stack)) / len(ranges)  # which a plan has for all ranges or for none
    stacks = [
        [measured((*whole[:index], table, *whole[index + 1 :])) for table in tables]
        for index, tables in enumerate(ranges)
    ]
    return Ranges(ranges, [np.array(of_range) - total + places for of_range in stacks])


def _ffn_choices(problem: Problem, plan: Plan, layer: int, *, must_stay: bool) -> list[Choice]:
    """Return the widths of an FFN, nothing first if it may be left out, with its experts, and the ranks of its linears.

    What fewer neurons and fewer experts lose adds up.
    """
    grid, method, damages, shape = problem.grid, problem.method, problem.known_damages, problem.grid.shape.of(layer)
    if layer in grid.family.dense_layers or layer in grid.kept.ffn:
        return _whole(plan)
    width, step = shape.intermediate_size, problem.width_step
    widths = [*(range(step, width, step) if method.reduces_ffn else ()), width]
    if problem.leaves_out_sublayers and not must_stay:
        widths = [0, *widths]
    sizes: list[Fields] = [{"intermediate_size": width} for width in widths]
    lost = damages["ffn"][:, widths]
    if method.plans_experts and shape.experts is not None:
        counts = expert_counts(shape.experts, grid.serving.tp)
        sizes = [size | {"num_experts": count} for size in sizes for count in counts]
        lost = _sums(lost, damages["num_experts"][:, counts])
    return [(sizes, lost.numpy()), *_rank_choices(problem, plan, shape, grid.family.stack.feed_forward)]


def _attention_choices(problem: Problem, plan: Plan, layer: int, *, must_attend: bool) -> list[Choice]:
    """Return the heads of attention, nothing first if it may be left out, with sizes inside them, and ranks."""
    grid, method, damages, shape = problem.grid, problem.method, problem.known_damages, problem.grid.shape.of(layer)
    if layer in grid.kept.attention or not grid.family.stack_of(layer).attentions:  # carried mixers stay
        return _whole(plan)
    units, kept = head_sizes(shape, plan.head_unit), plan.layers[layer]
    present = {"num_attention_heads": kept.num_attention_heads, "num_key_value_heads": kept.num_key_value_heads}
    sizes = units if method.reduces_heads and grid.heads_differ else [present]
    lost = damages["heads"][:, [units.index(heads) + 1 for heads in sizes]]
    if method.plans_inner_sizes and grid.inner_sizes_differ:
        inner = inner_sizes(grid)
        names = "query_key_size", "value_size"
        scores, values = (damages[name][:, [-1 if one[name] is None else one[name] for one in inner]] for name in names)
        lost = _sums(lost, scores + values)
        sizes = [heads | inside for heads in sizes for inside in inner]
    if problem.leaves_out_sublayers and not must_attend:
        lost = torch.cat((damages["heads"][:, :1], lost), 1)
        sizes = [NO_HEADS, *sizes]
    # what ranks cost is measured by the FFN that shrinks beside them
    has_ranks = layer not in grid.family.dense_layers
    ranks = _rank_choices(problem, plan, shape, grid.family.stack.attention) if has_ranks else []
    return [(sizes, lost.numpy()), *ranks]


def _whole(plan: Plan) -> list[Choice]:
    """Return the only option of a sublayer that stays."""
    return [([{}], np.zeros((len(plan.layers), 1)))]


def _rank_choices(
    problem: Problem, plan: Plan, shape: ModelShape, mixer: Attention | FeedForward | Experts
) -> list[Choice]:
    """Return the ranks of each linear of a mixer whose ranks are planned and known; the last one is whole."""
    method, damages, choices = problem.method, problem.known_damages, list[Choice]()
    if not (method.plans_ranks and problem.grid.has_ranks) or plan.reduces_queries_keys or plan.reduces_values:
        return choices
    for kind in mixer.ranked:
        name = f"{kind}_rank"
        if name in damages:
            ranks = rank_options(shape, kind, problem.target.round_to)
            lost = np.pad(damages[name][:, ranks].numpy(), ((0, 0), (0, 1)))
            choices.append(([{name: rank} for rank in [*ranks, None]], lost))
    return choices


def _sums(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the sums of every pair in each layer, `(layers, first × second)`."""
    return (first.unsqueeze(2) + second.unsqueeze(1)).flatten(1)


def _in_place(plan: Plan, layer: int, sizes: Fields) -> Plan:
    """Return the plan with these sizes in one layer."""
    return replace(plan, layers=(*plan.layers[:layer], replace(plan.layers[layer], **sizes), *plan.layers[layer + 1 :]))


def _with_ranks(shape: LayerShape, ranks: Fields) -> LayerShape:
    """Return the shape with these ranks, None for whole: nothing else of a layer depends on them."""
    own: dict[str, Any] = {name: rank or 0 for name, rank in ranks.items()}
    return replace(shape, **own)


def _misfits(problem: Problem, plan: Plan, layer: int, half: Half, choices: Sequence[list[Fields]]) -> np.ndarray:
    """Return zero for every option that can be served, and infinity for the others, `(options,)`.

    Raises `MisfitError` if no option can.
    """
    grid = problem.grid
    if grid.serving == ANY:
        return np.zeros(prod(map(len, choices)))
    found = []
    for sizes in choices[0]:
        whole = grid.layer(_in_place(plan, layer, sizes), layer)
        shapes = (reduce(_with_ranks, ranks, whole) for ranks in product(*choices[1:]))
        found += [inf if grid.misfit(layer, shape, half) else 0.0 for shape in shapes]
    if all(found):
        raise MisfitError(grid.misfit_sentence(plan, half))
    return np.array(found)


def _costs(problem: Problem, plan: Plan, layer: int, choices: Sequence[list[Fields]]) -> np.ndarray:
    """Return what every option adds to the budget's measure, `(options,)`; what ranks of two linears add, adds up."""
    grid, stack, index = problem.grid, problem.grid.stack(plan), plan.kept_layers.index(layer)

    def measure(shape: LayerShape) -> float:
        layers = (*stack.layers[:index], shape, *stack.layers[index + 1 :])
        return problem.budget.measure(replace(stack, layers=layers))

    sizes, *of_linears = choices
    shapes = [grid.layer(_in_place(plan, layer, one), layer) for one in sizes]
    own = np.array([measure(shape) for shape in shapes])
    total = own - problem.budget.measure(stack)
    for number, (*ranks, _) in enumerate(of_linears, start=1):  # the last one is whole
        added = [
            [*(measure(_with_ranks(shape, rank)) - alone for rank in ranks), 0.0]
            for shape, alone in zip(shapes, own, strict=True)
        ]
        total = np.expand_dims(total, -1) + np.expand_dims(np.array(added), tuple(range(1, number)))
    return total.ravel()
