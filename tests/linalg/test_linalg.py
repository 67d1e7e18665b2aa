"""Pivots, interpolation and ridge systems against SciPy, NumPy and brute force in float64."""

import itertools

import numpy as np
import pytest
import scipy.linalg
import scipy.linalg.interpolative
import scipy.sparse.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import TOLERANCES, Matrix, exact_rank, graded, low_rank_plus_noise, matrices, psd

from oneshot.linalg.conjugate_gradients import conjugate_gradients
from oneshot.linalg.interpolative import interpolate, spanning_columns
from oneshot.linalg.pivoted_qr import pivots_with_quota, weighted_pivots
from oneshot.linalg.psd import RidgeFactor


def gram_of(matrix: Matrix) -> torch.Tensor:
    return torch.from_numpy(matrix.T @ matrix)


def residual(matrix: Matrix, columns: torch.Tensor) -> float:
    """Return `‖A − A[:, J] T‖_F` for the best T, by NumPy's least squares."""
    skeleton = matrix[:, columns.numpy()]
    solution = np.linalg.lstsq(skeleton, matrix, rcond=None)[0]
    return float(np.linalg.norm(matrix - skeleton @ solution))


@given(matrix=matrices(), damping=st.sampled_from((1e-4, 1e-2, 1.0)), seed=st.integers(0, 100))
def test_ridge_solve_equals_stacked_least_squares(matrix: Matrix, damping: float, seed: int) -> None:
    targets = np.random.default_rng(seed).standard_normal((len(matrix), 3))
    factor = RidgeFactor(gram_of(matrix), damping)
    ridge = damping * np.diag(matrix.T @ matrix).mean()
    stacked = np.vstack([matrix, np.sqrt(ridge) * np.eye(matrix.shape[1])])
    expected = np.linalg.lstsq(stacked, np.vstack([targets, np.zeros((matrix.shape[1], 3))]), rcond=None)[0]
    solved = factor.solve(torch.from_numpy(matrix.T @ targets)).numpy()
    assert float(factor.ridge) == pytest.approx(ridge)
    scale = np.linalg.norm(expected) * np.linalg.cond(stacked) ** 2
    assert np.linalg.norm(solved - expected) <= TOLERANCES["solve"] * scale
    assert not factor.eigenvalue_fallback


def test_singular_gram_without_damping_falls_back_to_the_pseudo_inverse() -> None:
    matrix = np.random.default_rng(0).standard_normal((30, 6))
    matrix[:, 2] = 0
    gram = gram_of(matrix)
    factor = RidgeFactor(gram, 0.0)
    right = torch.from_numpy(matrix.T @ np.ones((30, 2)))
    assert factor.eigenvalue_fallback
    expected = scipy.linalg.pinvh(gram.numpy()) @ right.numpy()
    np.testing.assert_allclose(factor.solve(right).numpy(), expected, rtol=1e-9, atol=1e-12)
    nonzero = [0, 1, 3, 4, 5]
    assert factor.condition_number == pytest.approx(np.linalg.cond(gram.numpy()[np.ix_(nonzero, nonzero)]), rel=1e-6)


def test_indefinite_matrix_falls_back_and_drops_the_negative_direction() -> None:
    vectors = np.linalg.qr(np.random.default_rng(1).standard_normal((5, 5)))[0]
    matrix = vectors * np.array([4.0, 3.0, 2.0, 1.0, -0.5]) @ vectors.T
    factor = RidgeFactor(torch.from_numpy(matrix), 0.0)
    assert factor.eigenvalue_fallback
    expected = vectors[:, :4] / np.array([4.0, 3.0, 2.0, 1.0]) @ vectors[:, :4].T
    np.testing.assert_allclose(factor.solve(torch.eye(5)).numpy(), expected, atol=1e-12)


@given(gram=psd(), damping=st.sampled_from((1e-6, 1e-3, 1e-1)))
def test_condition_number_is_a_close_lower_bound(gram: Matrix, damping: float) -> None:
    factor = RidgeFactor(torch.from_numpy(gram), damping)
    exact = np.linalg.cond(gram + float(factor.ridge) * np.eye(len(gram)))
    assert 0.7 * exact <= factor.condition_number <= 1.001 * exact


@given(seed=st.integers(0, 1000), rank=st.integers(1, 9))
def test_undamped_interpolation_equals_scipy(seed: int, rank: int) -> None:
    matrix = np.random.default_rng(seed).standard_normal((30, 10))
    order, projection = scipy.linalg.interpolative.interp_decomp(matrix, rank, rand=False)
    result = interpolate(gram_of(matrix), torch.from_numpy(order[:rank].astype(np.int64)), 0.0)
    positions = {int(column): position for position, column in enumerate(order[rank:])}
    expected = projection[:, [positions[int(column)] for column in result.rest]]
    np.testing.assert_allclose(result.coefficients.numpy(), expected, rtol=1e-6, atol=1e-8)
    assert result.max_coefficient == pytest.approx(np.abs(projection).max(), rel=1e-6)


def test_interpolation_equals_the_blocks_of_pivoted_qr() -> None:
    matrix = graded(np.random.default_rng(3), 40, 12)
    _, upper, order = scipy.linalg.qr(matrix, mode="economic", pivoting=True)
    result = interpolate(gram_of(matrix), torch.from_numpy(order[:5].astype(np.int64)), 0.0)
    expected = scipy.linalg.solve_triangular(upper[:5, :5], upper[:5, 5:])
    ascending = np.argsort(order[5:])
    np.testing.assert_allclose(result.coefficients.numpy(), expected[:, ascending], rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(result.rest.numpy(), np.sort(order[5:]))


@given(matrix=matrices(), damping=st.sampled_from((1e-3, 1e-1)))
def test_damped_interpolation_equals_stacked_least_squares(matrix: Matrix, damping: float) -> None:
    skeleton = torch.arange(0, matrix.shape[1], 2)
    result = interpolate(gram_of(matrix), skeleton, damping)
    kept = matrix[:, skeleton.numpy()]
    ridge = damping * np.square(kept).sum(0).mean()
    stacked = np.vstack([kept, np.sqrt(ridge) * np.eye(len(skeleton))])
    targets = np.vstack([matrix[:, result.rest.numpy()], np.zeros((len(skeleton), len(result.rest)))])
    expected = np.linalg.lstsq(stacked, targets, rcond=None)[0]
    np.testing.assert_allclose(result.coefficients.numpy(), expected, rtol=1e-6, atol=1e-9)


@given(seed=st.integers(0, 1000), kind=st.sampled_from(("plain", "graded")))
def test_weighted_pivots_equal_scipy_qr(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((50, 12)) if kind == "plain" else graded(rng, 50, 12)
    weights = rng.uniform(0.5, 2.0, 12)
    order = scipy.linalg.qr(matrix * weights, mode="r", pivoting=True)[1]
    pivots = weighted_pivots(gram_of(matrix), torch.from_numpy(weights), rank=9)
    np.testing.assert_array_equal(pivots.numpy(), order[:9])


@given(matrix=matrices(), share=st.floats(0.1, 1.0))
def test_pivots_are_distinct_at_any_deficient_rank(matrix: Matrix, share: float) -> None:
    rank = max(1, int(share * matrix.shape[1]))
    pivots = weighted_pivots(gram_of(matrix), torch.ones(matrix.shape[1]), rank=rank)
    assert len(set(pivots.tolist())) == rank


def test_zero_weight_columns_come_last() -> None:
    matrix = np.random.default_rng(5).standard_normal((40, 8))
    weights = torch.tensor([0.0, 1, 1, 0, 1, 1, 0, 1])
    pivots = weighted_pivots(gram_of(matrix), weights, rank=5)
    assert set(pivots.tolist()) == {1, 2, 4, 5, 7}


@given(seed=st.integers(0, 1000), rank=st.integers(1, 8))
def test_exact_rank_leaves_no_residual(seed: int, rank: int) -> None:
    matrix = exact_rank(np.random.default_rng(seed), 40, 16, rank=rank)
    gram = gram_of(matrix)
    pivots = weighted_pivots(gram, torch.ones(16), rank=rank)
    norm = np.linalg.norm(matrix)
    assert residual(matrix, pivots) <= TOLERANCES["rank"] * norm
    result = interpolate(gram, pivots, 0.0)
    from_gram = matrix[:, result.rest.numpy()] - matrix[:, pivots.numpy()] @ result.coefficients.numpy()
    assert np.linalg.norm(from_gram) <= TOLERANCES["rank from gram"] * norm


@given(matrix=matrices())
def test_residual_never_rises_with_rank(matrix: Matrix) -> None:
    pivots = weighted_pivots(gram_of(matrix), torch.ones(matrix.shape[1]), rank=matrix.shape[1])
    errors = [residual(matrix, pivots[:rank]) for rank in range(1, matrix.shape[1] + 1)]
    slack = 1e-12 * np.linalg.norm(matrix)
    assert all(later <= earlier + slack for earlier, later in itertools.pairwise(errors))
    assert errors[-1] <= TOLERANCES["rank"] * np.linalg.norm(matrix)


def test_residual_equals_the_trailing_norm_of_scipys_r() -> None:
    matrix = low_rank_plus_noise(np.random.default_rng(7), 60, 20, rank=6)
    upper = scipy.linalg.qr(matrix, mode="r", pivoting=True)[0]
    pivots = weighted_pivots(gram_of(matrix), torch.ones(20), rank=6)
    assert residual(matrix, pivots) == pytest.approx(np.linalg.norm(upper[6:, 6:]), rel=1e-9)


def greedy_with_quota(matrix: Matrix, class_of: list[int], quota: int) -> list[int]:
    """Return pivots by brute force: the eligible column with the largest part outside the span, by a QR each time."""
    taken: list[int] = []
    while len(taken) < quota * (max(class_of) + 1):
        basis = np.linalg.qr(matrix[:, taken])[0]
        outside = np.linalg.norm(matrix - basis @ (basis.T @ matrix), axis=0)
        for column in range(matrix.shape[1]):
            full = sum(class_of[other] == class_of[column] for other in taken) == quota
            if column in taken or full:
                outside[column] = -1
        taken.append(int(outside.argmax()))
    return taken


@given(seed=st.integers(0, 1000), classes=st.integers(1, 4), quota=st.integers(1, 3))
def test_quota_pivots_equal_brute_force(seed: int, classes: int, quota: int) -> None:
    matrix = np.random.default_rng(seed).standard_normal((40, 3 * classes))
    class_of = [column % classes for column in range(3 * classes)]
    pivots = pivots_with_quota(gram_of(matrix), torch.tensor(class_of), quota=quota)
    assert pivots.tolist() == greedy_with_quota(matrix, class_of, quota)


@given(matrix=matrices(), classes=st.integers(1, 2), quota=st.integers(1, 2))
def test_quota_is_met_exactly_for_singular_grams(matrix: Matrix, classes: int, quota: int) -> None:
    class_of = torch.arange(matrix.shape[1]) % classes
    pivots = pivots_with_quota(gram_of(matrix), class_of, quota=quota)
    assert len(set(pivots.tolist())) == len(pivots)
    assert class_of[pivots].bincount().tolist() == [quota] * classes


@given(seed=st.integers(0, 1000), pivoting=st.sampled_from(("cholesky", "qr", "grouped", "tournament")))
def test_pivots_of_a_sketch_equal_scipy_qr_of_it(seed: int, pivoting: str) -> None:
    """One group holds all columns, so every kind of pivoting is plain pivoted QR of the weighted sketch."""
    rng = np.random.default_rng(seed)
    sketch, weights = rng.standard_normal((30, 12)), rng.uniform(0.5, 2.0, 12)
    pivots = weighted_pivots(
        torch.eye(12),  # must not be read
        torch.from_numpy(weights),
        rank=7,
        sketch=torch.from_numpy(sketch),
        pivoting=pivoting,
        group_size=12,
    )
    order = scipy.linalg.qr(sketch * weights, mode="r", pivoting=True)[1]
    assert set(pivots.tolist()) == set(order[:7].tolist())


@pytest.mark.parametrize("sketched", [False, True])
@pytest.mark.parametrize("pivoting", ["grouped", "tournament"])
@given(seed=st.integers(0, 1000))
def test_grouped_pivots_span_an_exact_rank(pivoting: str, sketched: bool, seed: int) -> None:
    matrix = exact_rank(np.random.default_rng(seed), 60, 24, rank=5)
    sketch = torch.from_numpy(np.random.default_rng(seed + 1).standard_normal((20, 60)) @ matrix) if sketched else None
    pivots = weighted_pivots(gram_of(matrix), torch.ones(24), rank=10, sketch=sketch, pivoting=pivoting, group_size=8)
    assert len(set(pivots.tolist())) == 10
    assert residual(matrix, pivots) <= TOLERANCES["rank"] * np.linalg.norm(matrix)


def test_unknown_pivoting_is_refused() -> None:
    with pytest.raises(ValueError, match="magic"):
        weighted_pivots(torch.eye(3), torch.ones(3), rank=2, pivoting="magic")
    with pytest.raises(ValueError, match="sketch"):
        weighted_pivots(torch.eye(3), torch.ones(3), rank=2, pivoting="qr")


@given(seed=st.integers(0, 1000), steps=st.integers(1, 6))
def test_conjugate_gradients_equal_scipys(seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    size, rows, columns = 12, 4, 3
    rows_of_design = rng.standard_normal((20, size))
    matrix, scale = rows_of_design.T @ rows_of_design, rng.uniform(0.5, 2.0, size)
    right = rng.standard_normal(size)
    expected, _ = scipy.sparse.linalg.cg(matrix, right, rtol=0.0, maxiter=steps, M=np.diag(scale))
    found = conjugate_gradients(
        torch.from_numpy(right).view(rows, columns),
        lambda x: (torch.from_numpy(matrix) @ x.flatten()).view(rows, columns),
        lambda x: torch.from_numpy(scale).view(rows, columns) * x,
        steps=steps,
    )
    np.testing.assert_allclose(found.flatten().numpy(), expected, rtol=1e-6, atol=1e-9)


def test_conjugate_gradients_stop_at_a_zero_residual() -> None:
    right = torch.zeros(3, 2)
    assert torch.equal(conjugate_gradients(right, lambda x: x, lambda x: x, steps=3), right)
    exact = torch.eye(3)[:, :2].clone()
    torch.testing.assert_close(conjugate_gradients(exact, lambda x: 2 * x, lambda x: x, steps=5), exact / 2)


@given(rows=st.integers(1, 12), further=st.integers(0, 12), condition=st.floats(0, 8), seed=st.integers(0, 10**6))
def test_spanning_columns_give_the_whole_matrix(rows: int, further: int, condition: float, seed: int) -> None:
    """Against NumPy's least squares on these columns; small coefficients even where the rows' scales differ by 1e8."""
    generator = np.random.default_rng(seed)
    scales = np.logspace(0, -condition, rows)[:, None]
    matrix = scales * generator.standard_normal((rows, rows + further))
    columns, others, coefficients = (found.numpy() for found in spanning_columns(torch.from_numpy(matrix)))
    assert sorted(columns.tolist() + others.tolist()) == list(range(rows + further))
    assert columns.tolist() == sorted(columns.tolist())
    rebuilt = (matrix / scales)[:, columns] @ coefficients
    np.testing.assert_allclose(rebuilt, (matrix / scales)[:, others], atol=1e-6)
    expected = np.linalg.lstsq((matrix / scales)[:, columns], (matrix / scales)[:, others], rcond=None)[0]
    np.testing.assert_allclose(coefficients, expected, atol=1e-6 * max(1.0, np.abs(expected).max(initial=0)))
    assert np.abs(coefficients).max(initial=0) <= 2.0**rows  # of partial pivoting
