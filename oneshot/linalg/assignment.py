"""Sharing rows out among columns of fixed sizes."""

from collections.abc import Sequence

import numpy as np

PRICE_STEPS = 200
SLOWER = 20  # steps after which the steps of prices are half as long


def balanced_assignment(costs: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return the column of every row at nearly the least sum of costs, so that each column gets as many as its size.

    A column that more rows want than it holds gets dearer, until prices lead rows where there is room: subgradient
    steps on the dual of the transportation problem (Bertsekas 1988). Then the rows to which the second best column is
    most costly choose first.

    Args:
        costs: `(rows, columns)`, of one order of magnitude. sizes: `(columns,)`, which sum to the number of rows.

    Returns:
        `(rows,)` int64.
    """
    held, prices = np.array(sizes), np.zeros(len(sizes))
    for step in range(PRICE_STEPS):
        wanted = np.bincount((costs + prices).argmin(axis=1), minlength=len(sizes))
        prices += costs.mean() / 2 / (1 + step / SLOWER) * (wanted - held) / np.maximum(held, 1)
    priced = costs + prices
    preferred = priced.argsort(axis=1, kind="stable")
    best = np.take_along_axis(priced, preferred[:, :2], axis=1)
    left, chosen = list(sizes), np.empty(len(costs), dtype=np.int64)
    for row in (best[:, 0] - best[:, -1]).argsort(kind="stable").tolist():
        column = next(column for column in preferred[row].tolist() if left[column])
        chosen[row] = column
        left[column] -= 1
    return chosen
