"""Grouped and tournament pivots, and Gu–Eisenstat swaps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import seeded, tall_or_wide, trailing_error
from oneshot_kernels import (
    PivotedFactor,
    grouped_pivots,
    pivoted_qr,
    tournament_pivots,
)

CHOOSERS: list[Callable[..., PivotedFactor]] = [grouped_pivots, tournament_pivots]


def spread(rows: int = 60, columns: int = 40) -> torch.Tensor:
    generator = seeded(4)
    matrix = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    return matrix @ torch.diag(
        torch.logspace(0, -2, columns, dtype=torch.float64)[torch.randperm(columns, generator=generator)]
    )


def kahan(size: int, cosine: float = 0.3) -> torch.Tensor:
    upper = torch.eye(size, dtype=torch.float64) - cosine * torch.ones(size, size, dtype=torch.float64).triu(1)
    scale = (1 - cosine**2) ** 0.5 * (1 - 1e-10)  # a little less, so that greedy pivoting keeps the order
    return scale ** torch.arange(size, dtype=torch.float64)[:, None] * upper


def test_every_group_keeps_its_share() -> None:
    matrix = spread(columns=22)
    factor = grouped_pivots(matrix=matrix, group_size=8, rank=11)  # groups of 8, 8, 6
    winners = factor.pivots[:11]
    assert [int(((winners >= low) & (winners < high)).sum()) for low, high in [(0, 8), (8, 16), (16, 22)]] == [4, 4, 3]
    for low, high, share in [(0, 8, 4), (8, 16, 4), (16, 22, 3)]:
        alone = pivoted_qr(matrix[:, low:high], method="lapack").pivots[:share] + low
        inside = winners[(winners >= low) & (winners < high)]
        assert set(inside.tolist()) == set(alone.tolist())


@pytest.mark.parametrize("choose", CHOOSERS)
def test_one_group_is_plain_pivoting(choose: Callable[..., PivotedFactor]) -> None:
    matrix = spread()
    best = pivoted_qr(matrix, method="lapack")
    for how in ({"matrix": matrix}, {"gram": matrix.mT @ matrix}):
        factor = choose(**how, group_size=80, rank=20)
        assert set(factor.pivots[:20].tolist()) == set(best.pivots[:20].tolist())
        assert abs(float(factor.trailing_errors[20]) - float(best.trailing_errors[20])) <= 1e-9


@pytest.mark.parametrize("choose", CHOOSERS)
@given(matrix=tall_or_wide(), group_size=st.integers(1, 30), fraction=st.floats(0, 1))
def test_gram_and_matrix_give_sound_factors(
    choose: Callable[..., PivotedFactor], matrix: torch.Tensor, group_size: int, fraction: float
) -> None:
    rank = int(fraction * matrix.shape[1])
    for how in ({"matrix": matrix}, {"gram": matrix.mT @ matrix}):
        factor = choose(**how, group_size=group_size, rank=rank)
        assert sorted(factor.pivots.tolist()) == list(range(matrix.shape[1]))
        assert factor.factorised_rank <= rank
        assert bool((factor.trailing_errors[1:] <= factor.trailing_errors[:-1]).all())
        used = factor.factorised_rank
        measured = trailing_error(matrix, factor, used)
        assert abs(measured - float(factor.trailing_errors[used])) <= 1e-6 * measured + 2e-6 * float(matrix.norm())


def test_tournament_avoids_the_repeats_that_one_round_keeps() -> None:
    """The same ten columns in two groups: one round sends the best five of them twice."""
    half = spread(columns=10)
    matrix = torch.cat([half, half], dim=1)
    one_round = grouped_pivots(matrix=matrix, group_size=10, rank=10)
    tournament = tournament_pivots(matrix=matrix, group_size=10, rank=10)
    assert one_round.factorised_rank == 5
    assert tournament.factorised_rank == 10
    assert float(tournament.trailing_errors[10]) <= 1e-12 * float(matrix.norm())
    assert float(one_round.trailing_errors[10]) > 1e-3 * float(matrix.norm())


def test_tournament_is_near_greedy() -> None:
    matrix = spread(200, 120)
    best = pivoted_qr(matrix, method="lapack")
    factor = tournament_pivots(gram=matrix.mT @ matrix, group_size=16, rank=60)
    assert float(factor.trailing_errors[60]) <= 1.1 * float(best.trailing_errors[60])


@pytest.mark.parametrize("choose", CHOOSERS)
@pytest.mark.parametrize(
    "how",
    [
        {"group_size": 2, "rank": 1},
        {"gram": torch.eye(3), "matrix": torch.eye(3), "group_size": 2, "rank": 1},
        {"gram": torch.eye(3), "group_size": 0, "rank": 1},
        {"gram": torch.eye(3), "group_size": 2, "rank": 4},
    ],
)
def test_refuses_what_does_not_fit(choose: Callable[..., PivotedFactor], how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"either|group_size|rank"):
        choose(**how)
