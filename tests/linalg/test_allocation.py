"""The planner's knapsack: the best choice within the budget, within tolerance where options are alike."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneshot.linalg.allocation import least_damage


@given(num_items=st.integers(1, 4), num_options=st.integers(1, 5), share=st.floats(0, 1.2), seed=st.integers(0, 10**6))
def test_the_knapsack_is_solved(num_items: int, num_options: int, share: float, seed: int) -> None:
    """Compare with all combinations."""
    generator = np.random.default_rng(seed)
    damages = list(generator.random((num_items, num_options)))
    costs = list(generator.random((num_items, num_options)) - 0.3)
    budget = share * sum(float(cost.max()) for cost in costs)
    fitting = [
        sum(damage[option] for damage, option in zip(damages, options, strict=True))
        for options in itertools.product(range(num_options), repeat=num_items)
        if sum(cost[option] for cost, option in zip(costs, options, strict=True)) <= budget
    ]
    chosen = least_damage(damages, costs, budget)
    if chosen is None:
        assert not fitting
        return
    assert sum(cost[option] for cost, option in zip(costs, chosen, strict=True)) <= budget + 1e-6
    found = sum(damage[option] for damage, option in zip(damages, chosen, strict=True))
    assert found == pytest.approx(min(fitting, default=found), abs=1e-7)


@given(
    num_items=st.integers(1, 12),
    num_options=st.integers(1, 30),
    convex=st.booleans(),
    share=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_the_knapsack_of_many_options_is_solved(
    num_items: int, num_options: int, convex: bool, share: float, seed: int
) -> None:
    """Compare with dynamic programming over whole costs, on curves that fall with the cost and on others."""
    generator = np.random.default_rng(seed)
    costs = [generator.integers(0, 60, num_options) for _ in range(num_items)]
    damages = list(generator.exponential(1, (num_items, num_options)))
    if convex:
        damages = [10 * (1 - cost / 60) ** 3 + 0.01 * damage for cost, damage in zip(costs, damages, strict=True)]
    budget = int(share * sum(cost.max() for cost in costs))
    least = np.zeros(budget + 1)  # by what may be spent
    for cost, damage in zip(costs, damages, strict=True):
        spent = np.full((num_options, budget + 1), np.inf)
        for option in np.flatnonzero(cost <= budget):
            spent[option, cost[option] :] = damage[option] + least[: budget + 1 - cost[option]]
        least = spent.min(axis=0)
    chosen = least_damage(damages, [cost.astype(float) for cost in costs], budget)
    if chosen is None:
        assert math.isinf(least[budget])
        return
    assert sum(cost[option] for cost, option in zip(costs, chosen, strict=True)) <= budget
    found = sum(damage[option] for damage, option in zip(damages, chosen, strict=True))
    assert found == pytest.approx(least[budget], rel=1e-7)


@given(num_options=st.integers(1, 9), dtype=st.sampled_from((np.float32, np.float64)), seed=st.integers(0, 10**6))
def test_the_cheapest_of_equal_damages_is_chosen(num_options: int, dtype: type, seed: int) -> None:
    """Rounding is no difference, and damages that are all 0 are no division by 0."""
    generator = np.random.default_rng(seed)
    costs = [generator.permutation(num_options).astype(float) for _ in range(3)]
    damages = [np.zeros(num_options, dtype), *(1 + 1e-16 * generator.random((2, num_options))).astype(dtype)]
    damages[2][costs[2] == 0] = 2 if num_options > 1 else 1
    chosen = least_damage(damages, costs, 3 * num_options)
    assert chosen is not None
    assert [cost[option] for cost, option in zip(costs, chosen, strict=True)] == [0, 0, min(1, num_options - 1)]


def test_options_on_one_line() -> None:
    """Every option costs what it saves, so no bound leaves any out; less than a step of the budget is left."""
    generator = np.random.default_rng(36)
    costs = [np.linspace(0, generator.integers(1000, 3000), 40).round() * 576 for _ in range(20)]
    damages = [1 - cost / 2e6 for cost in costs]
    budget = 0.6 * sum(float(cost.max()) for cost in costs)
    chosen = least_damage(damages, costs, budget)
    assert chosen is not None
    assert sum(cost[option] for cost, option in zip(costs, chosen, strict=True)) <= budget
    found = sum(damage[option] for damage, option in zip(damages, chosen, strict=True))
    assert found - (len(costs) - budget / 2e6) < 576 / 2e6
