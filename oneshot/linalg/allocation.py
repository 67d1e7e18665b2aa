"""Sizes with the least damage within a budget: a multiple-choice knapsack, solved exactly.

Most options cannot be in the best choice, as a Lagrangian bound shows at once (Kellerer, Pferschy and Pisinger 2004,
chapter 11). HiGHS (scipy) solves what is left.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

RELATIVE_GAP = 1e-6
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
    if _total(costs, best) <= budget:
        return best
    left = _possible(damages, costs, budget)
    chosen = _solve(
        [damage[options] for damage, options in zip(damages, left, strict=True)],
        [cost[options] for cost, options in zip(costs, left, strict=True)],
        budget,
    )
    return [int(options[index]) for options, index in zip(left, chosen, strict=True)]


def _possible(damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float) -> list[np.ndarray]:
    """Return the indices of each item's options that may be in the best choice.

    At any price of a cost, the least sum of damages and priced costs is a bound of the least damage. It rises by what
    an option adds to its item's least. So an option is impossible if that takes it above the damage of a choice within
    the budget.
    """
    price = _least_price(damages, costs, budget)
    priced = _priced(damages, costs, price)
    bound = sum(float(values.min()) for values in priced) - price * budget
    chosen = _least(priced)
    if _total(costs, chosen) > budget:  # no price was enough
        chosen = _least(costs)
    gap = _total(damages, _spend(damages, costs, budget, chosen)) - bound
    gap += ROUNDING * len(priced) * max(float(np.abs(values).max()) for values in priced)
    return [np.flatnonzero(values - values.min() <= gap) for values in priced]


def _least_price(damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float) -> float:
    """Return the least price of a cost at which the best option of every item is within the budget."""

    def fits(price: float) -> bool:
        return _total(costs, _least(_priced(damages, costs, price))) <= budget

    low, high = 0.0, _span(damages) / _span(costs)
    for _ in range(DOUBLINGS):
        if fits(high):
            break
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _spend(
    damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float, chosen: Sequence[int]
) -> list[int]:
    """Return a choice that spends what is left of the budget, option by option, where it helps most."""
    chosen = list(chosen)
    while True:
        room, best = max(0.0, budget - _total(costs, chosen)), (0.0, 0, 0)
        for item, (damage, cost, option) in enumerate(zip(damages, costs, chosen, strict=True)):
            other = int(np.argmin(np.where(cost - cost[option] <= room, damage, np.inf)))
            best = max(best, (float(damage[option] - damage[other]), item, other))
        gain, item, other = best
        if gain <= 0:
            return chosen
        chosen[item] = other


def _priced(damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], price: float) -> list[np.ndarray]:
    return [damage + price * cost for damage, cost in zip(damages, costs, strict=True)]


def _least(values: Sequence[np.ndarray]) -> list[int]:
    return [int(np.argmin(of_item)) for of_item in values]


def _total(values: Sequence[np.ndarray], chosen: Sequence[int]) -> float:
    return sum(float(of_item[option]) for of_item, option in zip(values, chosen, strict=True))


def _span(values: Sequence[np.ndarray]) -> float:
    """Return the largest difference between two options of an item, or 1 if there is none."""
    return max(float(np.ptp(of_item)) for of_item in values) or 1.0


def _solve(damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float) -> list[int]:
    """Return the best choice, as `least_damage`, by an integer program.

    The solver's tolerances are absolute, so damages and costs are counted from their item's least, up to 1.
    """
    damage_span, cost_span = _span(damages), _span(costs)
    room = (budget - sum(float(cost.min()) for cost in costs)) / cost_span
    damages = [(damage - damage.min()) / damage_span for damage in damages]
    costs = [(cost - cost.min()) / cost_span for cost in costs]
    sizes = [len(damage) for damage in damages]
    item_of = np.repeat(np.arange(len(sizes)), sizes)
    options = np.arange(len(item_of))
    one_each = csr_array((np.ones(len(options)), (item_of, options)), shape=(len(sizes), len(options)))
    with _silent_libraries():
        solution = milp(
            np.concatenate(damages),
            integrality=np.ones(len(options)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint(np.concatenate(costs)[None], -np.inf, room),
            ],
            options={"mip_rel_gap": RELATIVE_GAP},
        )
    if solution.x is None:
        raise RuntimeError(f"the planner's knapsack was not solved: {solution.message}")
    starts = np.cumsum([0, *sizes[:-1]])
    return [int(np.argmax(solution.x[start : start + size])) for start, size in zip(starts, sizes, strict=True)]


@contextmanager
def _silent_libraries() -> Iterator[None]:
    """Discard what C code prints.

    HiGHS 1.12 prints a line for every solution that it has to mend, even if it is silent (HiGHS.jl issue 312).
    """
    if sys.stdout is None:  # closed: its number may belong to another file
        yield
        return
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
