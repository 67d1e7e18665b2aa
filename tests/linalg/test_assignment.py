"""Rows shared out among columns of fixed sizes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from oneshot.linalg.assignment import balanced_assignment


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any), seed=st.integers(0, 10**6))
def test_columns_get_their_sizes_at_nearly_the_least_costs(sizes: list[int], seed: int) -> None:
    """Against scipy's exact assignment, in which every column stands as often as its size."""
    rows = sum(sizes)
    costs = np.random.default_rng(seed).random((rows, len(sizes)))
    chosen = balanced_assignment(costs, sizes)
    assert np.bincount(chosen, minlength=len(sizes)).tolist() == sizes
    expanded = np.repeat(costs, sizes, axis=1)
    least = expanded[linear_sum_assignment(expanded)].sum()
    found = costs[np.arange(rows), chosen].sum()
    assert least - 1e-9 <= found <= 1.25 * least + 0.5


def test_many_rows_come_near_the_least_costs() -> None:
    """One column is the best one of all rows, as a range of a high rank is."""
    generator, sizes = np.random.default_rng(0), [400, 300, 300]
    costs = generator.random((1000, 3)) * [0.1, 1, 2]
    chosen = balanced_assignment(costs, sizes)
    assert np.bincount(chosen).tolist() == sizes
    expanded = np.repeat(costs, sizes, axis=1)
    least = expanded[linear_sum_assignment(expanded)].sum()
    assert costs[np.arange(1000), chosen].sum() <= 1.02 * least
