"""Sets of experts with the least effect, beside all sets."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneshot.linalg.expert_sets import least_removal


def random_form(num_experts: int, rank: int, seed: int) -> torch.Tensor:
    """Return a Gram of rows with uneven norms that overlap."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_experts, rank, generator=generator, dtype=torch.float64)
    rows = rows * torch.rand(num_experts, 1, generator=generator, dtype=torch.float64).exp() + rows.mean(0)
    return rows @ rows.mT


def cost(form: torch.Tensor, experts: tuple[int, ...]) -> float:
    """Return the sum of the form's entries over a set, one by one."""
    return sum(float(form[i, j]) for i in experts for j in experts)


def chosen(form: torch.Tensor, num_removed: int, kept: torch.Tensor | None = None) -> tuple[int, ...]:
    return tuple(least_removal(form, num_removed, kept=kept).tolist())


@given(num_experts=st.integers(1, 8), rank=st.integers(1, 9), data=st.data(), seed=st.integers(0, 10**6))
def test_no_exchange_is_better_and_the_ends_are_exact(
    num_experts: int, rank: int, data: st.DataObject, seed: int
) -> None:
    form = random_form(num_experts, rank, seed)
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=num_experts, max_size=num_experts)))
    candidates = (~kept).nonzero().flatten().tolist()
    num_removed = data.draw(st.integers(0, len(candidates)))
    experts = chosen(form, num_removed, kept)
    assert list(experts) == sorted(set(experts))
    assert len(experts) == num_removed
    assert set(experts) <= set(candidates)
    tolerance = 1e-9 * float(form.abs().max())
    for leaves, enters in itertools.product(experts, set(candidates) - set(experts)):
        exchanged = tuple(sorted({*experts, enters} - {leaves}))
        assert cost(form, experts) <= cost(form, exchanged) + tolerance
    if num_removed in (0, 1, len(candidates) - 1, len(candidates)):
        least = min(cost(form, other) for other in itertools.combinations(candidates, num_removed))
        assert cost(form, experts) == pytest.approx(least, rel=1e-9, abs=tolerance)


@given(num_experts=st.integers(1, 8), data=st.data(), seed=st.integers(0, 10**6))
def test_without_overlap_the_smallest_effects_go(num_experts: int, data: st.DataObject, seed: int) -> None:
    effects = torch.rand(num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    num_removed = data.draw(st.integers(0, num_experts))
    expected = sorted(effects.argsort()[:num_removed].tolist())
    assert list(chosen(torch.diag(effects), num_removed)) == expected


def test_nearly_all_sets_are_the_best_ones() -> None:
    """Compare with all sets: 200 forms of 8 experts, of which 4 go."""
    ratios = []
    for seed in range(200):
        form = random_form(8, 3 + seed % 8, seed)
        least = min(cost(form, other) for other in itertools.combinations(range(8), 4))
        ratios.append(cost(form, chosen(form, 4)) / least)
    assert sum(ratio < 1 + 1e-6 for ratio in ratios) > 190
    assert sum(ratios) / len(ratios) < 1.01


def test_two_experts_that_cancel_go_together() -> None:
    """Each alone has the largest effect: adding takes the other two, whence no exchange leads to the best set."""
    rows = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert chosen(rows @ rows.mT, 2) == (0, 1)


def test_what_cannot_be_removed_is_refused() -> None:
    form = random_form(4, 4, 0)
    with pytest.raises(ValueError, match="3 experts cannot be removed from 2 candidates"):
        least_removal(form, 3, kept=torch.tensor([True, True, False, False]))
    with pytest.raises(ValueError, match="not finite"):
        least_removal(form / 0, 1)
