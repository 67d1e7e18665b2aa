"""The planner's knapsack: the best choice within the budget, and nothing printed."""

import ctypes
import itertools

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
    assert found == pytest.approx(min(fitting, default=found), abs=1e-5)


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS 1.12 prints a line while it solves this problem, to C's own buffer; what others print must survive."""
    libc = ctypes.CDLL(None)
    generator = np.random.default_rng(1056)
    num_items, num_options = int(generator.integers(2, 8)), int(generator.integers(3, 30))
    costs = [np.sort(generator.integers(0, 2000, num_options)) * 576.0 for _ in range(num_items)]
    damages = [
        generator.exponential(1, num_options).cumsum()[::-1] * 10.0 ** generator.integers(-9, 1)
        - generator.uniform(0, 0.01)
        for _ in range(num_items)
    ]
    print("before")
    libc.puts(b"before, in C")
    assert least_damage(damages, costs, 0.7 * sum(cost.mean() for cost in costs)) is not None
    print("after")
    libc.puts(b"after, in C")
    libc.fflush(None)
    assert sorted(capfd.readouterr().out.splitlines()) == ["after", "after, in C", "before", "before, in C"]
