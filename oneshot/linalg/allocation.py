"""Sizes with the least damage within a budget: a multiple-choice knapsack, solved exactly by HiGHS (scipy)."""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

RELATIVE_GAP = 1e-6


def least_damage(damages: Sequence[np.ndarray], costs: Sequence[np.ndarray], budget: float) -> list[int] | None:
    """Choose one option of every item, with the least sum of damages and a sum of costs of at most `budget`.

    Args:
        damages, costs: for every item a float array `(options,)`, both finite.

    Returns:
        The index of each item's option, or None if even the cheapest options are above the budget.
    """
    if sum(cost.min() for cost in costs) > budget:
        return None
    sizes = [len(damage) for damage in damages]
    item_of = np.repeat(np.arange(len(sizes)), sizes)
    options = np.arange(len(item_of))
    one_each = csr_array((np.ones(len(options)), (item_of, options)), shape=(len(sizes), len(options)))
    cost, damage = np.concatenate(costs), np.concatenate(damages)
    scale = max(float(np.abs(cost).max()), 1.0)
    within = LinearConstraint(cost[None] / scale, -np.inf, budget / scale)
    with _silent_libraries():
        solution = milp(
            damage / max(float(np.abs(damage).max()), 1e-300),
            integrality=np.ones(len(options)),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), within],
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
