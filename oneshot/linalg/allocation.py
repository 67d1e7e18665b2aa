"""Sizes with the least damage within a budget: a multiple-choice knapsack, solved exactly.

Most options cannot be in the best choice, as a Lagrangian bound shows at once (Kellerer, Pferschy and Pisinger 2004,
chapter 11). Dynamic programming with the same bound solves what is left. HiGHS 1.12 in scipy prints to the standard
output of the process, which nobody can discard without taking it from other threads.
"""

from collections.abc import Sequence

import numpy as np

RELATIVE_GAP = 1e-6  # of the damage above each item's least, if there are more states than these
MOST_STATES = 2**16
LEAST_PRICE = 1e-9  # of a cost, in damages, each as a share of its largest difference
DOUBLINGS, HALVINGS = 60, 100  # of the price of a cost
ROUNDING = 64 * float(np.finfo(float).eps)


def least_damage(damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float) -> list[int] | None:
    """Choose one option of every item, with the least sum of damages and a sum of costs of at most `budget`.

    Costs have a price of nearly nothing, so that the cheapest of equal damages is chosen.

    Args:
        damages, costs: for every item a float array `(options,)`, both finite.

    Returns:
        The index of each item's option, or None if even the cheapest options are above the budget.
    """
    if sum(cost.min() for cost in costs) > budget:
        return None
    costs = [np.asarray(cost, float) for cost in costs]
    damages = _priced(damages, costs, LEAST_PRICE * _span(damages) / _span(costs))
    best = _least(damages)
    if total_of(costs, best) <= budget:
        return best
    price = _least_price(damages, costs, budget)
    left = _possible(damages, costs, budget, price)
    chosen = _solve(
        [damage[options] for damage, options in zip(damages, left, strict=True)],
        [cost[options] for cost, options in zip(costs, left, strict=True)],
        budget,
        price,
    )
    return [int(options[index]) for options, index in zip(left, chosen, strict=True)]


def _possible(
    damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float, price: float
) -> list[np.ndarray]:
    """Return the indices of each item's options that may be in the best choice.

    At any price of a cost, the least sum of damages and priced costs is a bound of the least damage. It rises by what
    an option adds to its item's least. So an option is impossible if that takes it above the damage of a choice within
    the budget.
    """
    priced = _priced(damages, costs, price)
    bound = sum(float(values.min()) for values in priced) - price * budget
    chosen = _least(priced)
    if total_of(costs, chosen) > budget:  # no price was enough
        chosen = _least(costs)
    gap = total_of(damages, _spend(damages, costs, budget, chosen)) - bound
    gap += ROUNDING * len(priced) * max(float(np.abs(values).max()) for values in priced)
    return [np.flatnonzero(values - values.min() <= gap) for values in priced]


def _least_price(damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float) -> float:
    """Return the least price of a cost at which the best option of every item is within the budget."""
    damage, cost = _rows(damages, np.inf), _rows(costs, 0.0)
    items = np.arange(len(cost))

    def fits(price: float) -> bool:
        return float(cost[items, (damage + price * cost).argmin(axis=1)].sum()) <= budget

    low, high = 0.0, _span(damages) / _span(costs)
    for _ in range(DOUBLINGS):
        if fits(high):
            break
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:  # no number is between them
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _rows(values: Sequence[np.ndarray], fill: float) -> np.ndarray:
    """Return a matrix `(items, most options)`, with `fill` behind each item's options."""
    rows = np.full((len(values), max(map(len, values))), fill)
    for row, of_item in zip(rows, values, strict=True):
        row[: len(of_item)] = of_item
    return rows


def _spend(
    damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float, chosen: Sequence[int]
) -> list[int]:
    """Return a choice that spends what is left of the budget, option by option, where it helps most."""
    chosen = list(chosen)
    while True:
        room, best = max(0.0, budget - total_of(costs, chosen)), (0.0, 0, 0)
        for item, (damage, cost, option) in enumerate(zip(damages, costs, chosen, strict=True)):
            other = int(np.where(cost - cost[option] <= room, damage, np.inf).argmin())
            best = max(best, (float(damage[option] - damage[other]), item, other))
        gain, item, other = best
        if gain <= 0:
            return chosen
        chosen[item] = other


def _priced(damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], price: float) -> list[np.ndarray]:
    return [damage + price * cost for damage, cost in zip(damages, costs, strict=True)]


def _least(values: Sequence[np.ndarray]) -> list[int]:
    return [int(of_item.argmin()) for of_item in values]


def total_of(values: Sequence[np.ndarray], chosen: Sequence[int]) -> float:
    """Return the sum of what a choice takes of every item; `chosen`: the index of each item's option."""
    return sum(float(of_item[option]) for of_item, option in zip(values, chosen, strict=True))


def _span(values: Sequence[np.ndarray]) -> float:
    """Return the largest difference between two options of an item, or 1 if there is none."""
    return max(float(np.ptp(of_item)) for of_item in values) or 1.0


def _solve(damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float, price: float) -> list[int]:
    """Return the best choice, as `least_damage`, by dynamic programming over the items.

    A state is a choice for the first items. It goes on if no other state has less damage at no more cost, and if its
    bound, as in `_possible`, is below the damage of the best choice so far. Every state with the likely options of the
    items behind it is such a choice. If states are too many, those with the least bounds go on, and then a choice
    counts as the best within `RELATIVE_GAP`.
    """
    priced = _priced(damages, costs, price)
    likely = _least(priced)
    best = _spend(damages, costs, budget, likely if total_of(costs, likely) <= budget else _least(costs))
    least = total_of(damages, best)
    span = least - sum(float(damage.min()) for damage in damages)
    margin = ROUNDING * len(priced) * max(float(np.abs(values).max()) for values in priced)
    least_priced, least_cost = _behind([values.min() for values in priced]), _behind([cost.min() for cost in costs])
    likely_damage, likely_cost = (
        _behind([values[option] for values, option in zip(of_all, likely, strict=True)]) for of_all in (damages, costs)
    )
    damage, cost, kept = np.zeros(1), np.zeros(1), list[np.ndarray]()
    for item, (of_damage, of_cost) in enumerate(zip(damages, costs, strict=True), 1):
        damage, cost = (damage[:, None] + of_damage).ravel(), (cost[:, None] + of_cost).ravel()
        whole = np.where(cost + likely_cost[item] <= budget, damage + likely_damage[item], np.inf)
        state = int(whole.argmin())
        if whole[state] < least:
            least, best = float(whole[state]), [*_options(kept, damages[:item], state), *likely[item:]]
        bound = damage + least_priced[item] - price * (budget - cost)
        states = np.flatnonzero((bound < least + margin) & (cost + least_cost[item] <= budget))
        if not len(states):
            break
        states = states[np.lexsort((damage[states], cost[states]))]
        lowest = np.minimum.accumulate(damage[states])
        states = states[np.append(True, lowest[1:] < lowest[:-1])]
        most = MOST_STATES // max(map(len, damages))
        if len(states) > most:
            states = states[np.sort(np.argsort(bound[states], kind="stable")[:most])]
            margin = -RELATIVE_GAP * span
        damage, cost = damage[states], cost[states]
        kept.append(states)
    return best


def _options(kept: Sequence[np.ndarray], damages: Sequence[np.ndarray], state: int) -> list[int]:
    """Return a state's option of every item; `kept`: the states behind all items but the last that went on."""
    options = list[int]()
    for states, damage in zip([*kept, None][::-1], damages[::-1], strict=True):
        state, option = divmod(state if states is None else int(states[state]), len(damage))
        options.append(option)
    return options[::-1]


def _behind(values: Sequence[float]) -> np.ndarray:
    """Return the sums of what is behind the first 0, 1, … of all values."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)
