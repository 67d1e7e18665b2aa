"""Corrections against independent least squares by NumPy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import TOLERANCES, Matrix, matrices

from oneshot.compression.correction import DAMPINGS, Factors, best_damping, correct
from oneshot.compression.statistics import GramAccumulator, Statistics, with_constant_column
from oneshot.errors import CalibrationError
from oneshot.method import Correction

ROWS, NEURONS, OUTPUTS = 120, 16, 6


def exact_statistics(activations: Matrix, residual_target: Matrix | None = None) -> Statistics:
    """Return sums in float64 by NumPy."""
    target = residual_target
    return Statistics(
        gram=torch.from_numpy(activations.T @ activations),
        residual=None if target is None else torch.from_numpy(activations.T @ target),
        residual_energy=torch.tensor(0.0 if target is None else float(np.square(target).sum()), dtype=torch.float64),
        num_rows=len(activations),
    )


def problem(seed: int, *, bias: bool = False) -> tuple[Matrix, Matrix, torch.Tensor, Matrix]:
    """Return correlated activations `A`, a weight `W`, kept columns `J` and a residual beyond `A Wᵀ`."""
    rng = np.random.default_rng(seed)
    activations = rng.standard_normal((ROWS, 5)) @ rng.standard_normal((5, NEURONS))
    activations += 0.3 * rng.standard_normal((ROWS, NEURONS)) + 0.5
    if bias:
        activations = np.column_stack([activations, np.ones(ROWS)])
    weight = rng.standard_normal((OUTPUTS, activations.shape[1]))
    kept_columns = np.sort(rng.choice(NEURONS, size=int(rng.integers(2, NEURONS)), replace=False))
    if bias:
        kept_columns = np.append(kept_columns, NEURONS)
    residual = 0.2 * activations[:, :3] @ rng.standard_normal((3, OUTPUTS)) + 0.1 * rng.standard_normal((ROWS, OUTPUTS))
    return activations, weight, torch.from_numpy(kept_columns), residual


def measured_error(activations: Matrix, factors: Factors, expected: Matrix) -> float:
    reached = activations[:, factors.kept_columns.numpy()] @ factors.weight.numpy().T
    return float(np.linalg.norm(expected - reached) / np.linalg.norm(expected))


def ridge_least_squares(
    activations: Matrix, kept_columns: torch.Tensor, weight: Matrix, target: Matrix, damping: float
) -> Any:
    """Solve `min ‖target − A_J X‖² + λ‖X − W_Jᵀ‖²`, `λ = damping · mean ‖a_j‖²`, by NumPy with stacked rows."""
    skeleton, prior = activations[:, kept_columns.numpy()], weight[:, kept_columns.numpy()].T
    root = np.sqrt(damping * np.square(skeleton).sum(0).mean())
    rows = np.vstack([skeleton, root * np.eye(len(kept_columns))])
    return np.linalg.lstsq(rows, np.vstack([target, root * prior]), rcond=None)[0].T


@given(seed=st.integers(0, 5000), bias=st.booleans(), damping=st.sampled_from((1e-6, 1e-2, 0.5)))
def test_same_layer_equals_ridge_least_squares(seed: int, bias: bool, damping: float) -> None:
    activations, weight, kept_columns, _ = problem(seed, bias=bias)
    factors = correct(
        torch.from_numpy(weight), kept_columns, exact_statistics(activations), correction="same-layer", damping=damping
    )
    expected = ridge_least_squares(activations, kept_columns, weight, activations @ weight.T, damping)
    np.testing.assert_allclose(factors.weight.numpy(), expected, rtol=1e-7, atol=1e-7)


@given(seed=st.integers(0, 5000))
def test_a_bias_takes_the_mean_contribution_of_removed_columns(seed: int) -> None:
    activations, weight, kept_columns, _ = problem(seed, bias=True)
    factors = correct(
        torch.from_numpy(weight), kept_columns, exact_statistics(activations), correction="bias", damping=0.1
    )
    removed = np.setdiff1d(np.arange(weight.shape[1]), kept_columns)
    expected = weight[:, kept_columns.numpy()].copy()
    expected[:, -1] += (activations[:, removed] @ weight[:, removed].T).mean(0)
    np.testing.assert_allclose(factors.weight.numpy(), expected, rtol=1e-10, atol=1e-10)
    assert factors.predicted_error == pytest.approx(measured_error(activations, factors, activations @ weight.T))


@given(seed=st.integers(0, 5000), bias=st.booleans(), share=st.sampled_from((0.0, 0.5, 1.0)))
def test_two_stream_equals_ridge_least_squares_on_the_dense_target(seed: int, bias: bool, share: float) -> None:
    activations, weight, kept_columns, residual = problem(seed, bias=bias)
    factors = correct(
        torch.from_numpy(weight),
        kept_columns,
        exact_statistics(activations, residual),
        correction="two-stream",
        damping=1e-3,
        residual_weight=share,
    )
    target = activations @ weight.T + share * residual
    expected = ridge_least_squares(activations, kept_columns, weight, target, 1e-3)
    np.testing.assert_allclose(factors.weight.numpy(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("correction", ["none", "same-layer", "two-stream"])
@given(seed=st.integers(0, 5000), bias=st.booleans())
def test_predicted_error_equals_measured_error(correction: Correction, seed: int, bias: bool) -> None:
    activations, weight, kept_columns, residual = problem(seed, bias=bias)
    two_streams = correction == "two-stream"
    accumulator = GramAccumulator(
        activations.shape[1], output_size=OUTPUTS if two_streams else None, device=torch.device("cpu")
    )
    plain = torch.from_numpy(activations[:, :NEURONS])
    expected = activations @ weight.T + (residual if two_streams else 0)
    accumulator.update_(
        with_constant_column(plain) if bias else plain, torch.from_numpy(residual) if two_streams else None
    )
    statistics = accumulator.finish()
    factors = correct(torch.from_numpy(weight), kept_columns, statistics, correction=correction, damping=1e-2)
    assert factors.predicted_error == pytest.approx(
        measured_error(activations, factors, expected), rel=1e-3, abs=TOLERANCES["float32 error"]
    )


@pytest.mark.parametrize("correction", ["same-layer", "two-stream"])
@given(matrix=matrices(min_columns=6), seed=st.integers(0, 5000), damping=st.sampled_from((1e-8, 1e-4, 1e-2, 1.0)))
def test_correction_is_never_worse_than_none(correction: Correction, matrix: Matrix, seed: int, damping: float) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((OUTPUTS, matrix.shape[1]))
    residual = 0.3 * rng.standard_normal((len(matrix), OUTPUTS)) if correction == "two-stream" else None
    kept_columns = torch.from_numpy(np.sort(rng.choice(matrix.shape[1], size=matrix.shape[1] // 2, replace=False)))
    statistics = exact_statistics(matrix, residual)
    plain = correct(torch.from_numpy(weight), kept_columns, statistics, correction="none", damping=damping)
    corrected = correct(torch.from_numpy(weight), kept_columns, statistics, correction=correction, damping=damping)
    expected = matrix @ weight.T + (0 if residual is None else residual)
    assert measured_error(matrix, corrected, expected) <= measured_error(matrix, plain, expected) * (1 + 1e-9)


@given(seed=st.integers(0, 5000), two_streams=st.booleans())
def test_the_best_damping_has_the_least_error_on_held_out_rows(seed: int, two_streams: bool) -> None:
    activations, weight, kept_columns, residual = problem(seed)
    residual = residual if two_streams else np.zeros_like(residual)
    few = len(kept_columns) + 2  # so that the ridge matters
    held_out = slice(few, None)

    def error(damping: float) -> float:
        expected = activations @ weight.T + residual
        fitted = ridge_least_squares(activations[:few], kept_columns, weight, expected[:few], damping)
        return float(np.square(expected[held_out] - activations[held_out][:, kept_columns.numpy()] @ fitted.T).sum())

    statistics = replace(
        exact_statistics(activations, residual if two_streams else None),
        held_out=exact_statistics(activations[held_out], residual[held_out] if two_streams else None),
    )
    correction: Correction = "two-stream" if two_streams else "same-layer"
    chosen = best_damping(torch.from_numpy(weight), kept_columns, statistics, correction=correction)
    assert error(chosen) <= min(error(damping) for damping in DAMPINGS) * (1 + 1e-6)


def test_a_damping_cannot_be_chosen_on_all_rows() -> None:
    activations, weight, kept_columns, _ = problem(2)
    statistics = exact_statistics(activations)
    with pytest.raises(CalibrationError, match="--set damping=auto"):
        best_damping(
            torch.from_numpy(weight), kept_columns, replace(statistics, held_out=statistics), correction="same-layer"
        )


def test_no_correction_keeps_the_columns_unchanged() -> None:
    activations, weight, kept_columns, _ = problem(1)
    factors = correct(
        torch.from_numpy(weight), kept_columns, exact_statistics(activations), correction="none", damping=0.1
    )
    np.testing.assert_array_equal(factors.weight.numpy(), weight[:, kept_columns.numpy()])
    assert factors.condition_number is None
    assert factors.max_interpolation is None


def test_factors_state_the_condition_number_and_the_largest_coefficient() -> None:
    activations, weight, kept_columns, _ = problem(2)
    factors = correct(
        torch.from_numpy(weight), kept_columns, exact_statistics(activations), correction="same-layer", damping=1e-2
    )
    skeleton = activations[:, kept_columns.numpy()]
    gram = skeleton.T @ skeleton
    system = gram + 1e-2 * np.diag(gram).mean() * np.eye(len(kept_columns))
    rest = np.setdiff1d(np.arange(NEURONS), kept_columns.numpy())
    interpolation = np.linalg.solve(system, skeleton.T @ activations[:, rest])
    assert factors.condition_number == pytest.approx(np.linalg.cond(system), rel=0.3)
    assert factors.max_interpolation == pytest.approx(np.abs(interpolation).max(), rel=1e-9)
