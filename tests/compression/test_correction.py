"""Corrections against independent least squares by NumPy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import TOLERANCES, Matrix, matrices

from oneshot.compression.correction import DAMPINGS, SHRINKAGES, Factors, best_damping, best_shrinkage, correct
from oneshot.compression.statistics import (
    LITTLE_TEXT,
    GramAccumulator,
    Statistics,
    shrinkage_of,
    towards_diagonal,
    with_constant_column,
)
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
    activations: Matrix, kept_columns: torch.Tensor, weight: Matrix, target: Matrix, damping: float, chance: float = 0.0
) -> Any:
    """Solve `min (1 − s) ‖target − A_J X‖² + ‖M (X − W_Jᵀ)‖²` by NumPy with stacked rows.

    `M² = λ I + s diag(‖a_j‖²)` with `λ = damping · mean ‖a_j‖²` and `s = chance`.
    """
    skeleton, prior = activations[:, kept_columns.numpy()], weight[:, kept_columns.numpy()].T
    energies = np.square(skeleton).sum(0)
    root = np.sqrt(damping * energies.mean() + chance * energies)
    rows = np.vstack([np.sqrt(1 - chance) * skeleton, np.diag(root)])
    return np.linalg.lstsq(rows, np.vstack([np.sqrt(1 - chance) * target, root[:, None] * prior]), rcond=None)[0].T


SHARES_OF_CHANCE = (0.0, 0.3, 0.9, 1.0)


@given(
    seed=st.integers(0, 5000),
    bias=st.booleans(),
    damping=st.sampled_from((1e-6, 1e-2, 0.5)),
    chance=st.sampled_from(SHARES_OF_CHANCE),
)
def test_same_layer_equals_ridge_least_squares(seed: int, bias: bool, damping: float, chance: float) -> None:
    activations, weight, kept_columns, _ = problem(seed, bias=bias)
    factors = correct(
        torch.from_numpy(weight),
        kept_columns,
        exact_statistics(activations),
        correction="same-layer",
        damping=damping,
        shrinkage=chance,
    )
    expected = ridge_least_squares(activations, kept_columns, weight, activations @ weight.T, damping, chance)
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


@given(
    seed=st.integers(0, 5000),
    bias=st.booleans(),
    share=st.sampled_from((0.0, 0.5, 1.0)),
    chance=st.sampled_from(SHARES_OF_CHANCE),
)
def test_two_stream_equals_ridge_least_squares_on_the_dense_target(
    seed: int, bias: bool, share: float, chance: float
) -> None:
    activations, weight, kept_columns, residual = problem(seed, bias=bias)
    factors = correct(
        torch.from_numpy(weight),
        kept_columns,
        exact_statistics(activations, residual),
        correction="two-stream",
        damping=1e-3,
        residual_weight=share,
        shrinkage=chance,
    )
    target = activations @ weight.T + share * residual
    expected = ridge_least_squares(activations, kept_columns, weight, target, 1e-3, chance)
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
@given(
    matrix=matrices(min_columns=6),
    seed=st.integers(0, 5000),
    damping=st.sampled_from((1e-8, 1e-4, 1e-2, 1.0)),
    chance=st.sampled_from(SHARES_OF_CHANCE),
)
def test_correction_is_never_worse_than_none(
    correction: Correction, matrix: Matrix, seed: int, damping: float, chance: float
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((OUTPUTS, matrix.shape[1]))
    residual = 0.3 * rng.standard_normal((len(matrix), OUTPUTS)) if correction == "two-stream" else None
    kept_columns = torch.from_numpy(np.sort(rng.choice(matrix.shape[1], size=matrix.shape[1] // 2, replace=False)))
    statistics = exact_statistics(matrix, residual)
    plain = correct(torch.from_numpy(weight), kept_columns, statistics, correction="none", damping=damping)
    corrected = correct(
        torch.from_numpy(weight), kept_columns, statistics, correction=correction, damping=damping, shrinkage=chance
    )
    if chance == 1:
        np.testing.assert_array_equal(corrected.weight.numpy(), plain.weight.numpy())
    expected = matrix @ weight.T + (0 if residual is None else residual)
    assert measured_error(matrix, corrected, expected) <= measured_error(matrix, plain, expected) * (1 + 1e-9)


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_what_few_tokens_for_a_column_correct_is_also_right_on_other_rows(tokens: int) -> None:
    """The shrunk correction has less error there than none, and than one that takes the sums as they are."""
    seeds, errors = range(8), {"none": 0.0, "all": 0.0, "shrunk": 0.0}
    chance = shrinkage_of(NEURONS, tokens * NEURONS)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        mixing = np.eye(NEURONS) + 0.1 * rng.standard_normal((NEURONS, NEURONS))
        rows = rng.standard_normal((tokens * NEURONS, NEURONS)) @ mixing
        others = rng.standard_normal((50 * NEURONS, NEURONS)) @ mixing
        weight, kept = torch.from_numpy(rng.standard_normal((OUTPUTS, NEURONS))), torch.arange(0, NEURONS, 2)
        statistics = exact_statistics(rows)
        for name, share in (("none", 1.0), ("all", 0.0), ("shrunk", chance)):
            factors = correct(weight, kept, statistics, correction="same-layer", damping=0.03, shrinkage=share)
            errors[name] += measured_error(others, factors, others @ weight.numpy().T) / len(seeds)
    assert errors["shrunk"] < min(errors["none"], errors["all"])


@given(num_columns=st.integers(1, 10**5), tokens=st.floats(0, 1000))
def test_the_share_of_chance_falls_to_nothing(num_columns: int, tokens: float) -> None:
    share = shrinkage_of(num_columns, tokens * num_columns)
    assert 0 <= share <= 1
    assert share <= shrinkage_of(num_columns, tokens * num_columns / 2)
    assert (share == 0) == (tokens * num_columns >= 16 * num_columns or tokens * num_columns > LITTLE_TEXT)
    gram = torch.tensor([[4.0, 1.0], [1.0, 2.0]])
    assert (towards_diagonal(gram, share) is gram) == (share == 0)


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


@given(seed=st.integers(0, 5000), tokens=st.sampled_from((1, 2, 4, 16)), mixing=st.sampled_from((0.0, 0.1, 1.0)))
def test_held_out_rows_say_how_much_is_corrected(seed: int, tokens: int, mixing: float) -> None:
    """What is solved without them has at most the error of both ends there, and about the least of all shares."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((8 * tokens * NEURONS // 7, NEURONS))
    rows = rows @ (np.eye(NEURONS) + mixing * rng.standard_normal((NEURONS, NEURONS)))
    cut = tokens * NEURONS
    weight, kept = torch.from_numpy(rng.standard_normal((OUTPUTS, NEURONS))), torch.arange(0, NEURONS, 2)
    statistics = replace(exact_statistics(rows), held_out=exact_statistics(rows[cut:]))

    def error(share: float) -> float:
        fitted = exact_statistics(rows[:cut])
        factors = correct(weight, kept, fitted, correction="same-layer", damping=0.03, shrinkage=share)
        return measured_error(rows[cut:], factors, rows[cut:] @ weight.numpy().T)

    chosen = best_shrinkage(weight, kept, statistics, damping=0.03)
    assert chosen in SHRINKAGES
    assert error(chosen) <= min(error(0.0), error(1.0)) * (1 + 1e-6)
    if chosen < 1:
        assert error(chosen) <= 1.01 * min(error(share) for share in SHRINKAGES if share <= chosen) * (1 + 1e-6)


def test_text_of_one_block_is_corrected_with_care(caplog: pytest.LogCaptureFixture) -> None:
    """All of it is held out, so nothing says what a correction does to other text."""
    activations, weight, kept, _ = problem(0)
    whole = exact_statistics(activations)
    all_held_out = replace(whole, held_out=whole)
    assert best_shrinkage(torch.from_numpy(weight), kept, all_held_out, damping=0.03) == SHRINKAGES[-1]
    assert best_damping(torch.from_numpy(weight), kept, all_held_out, correction="same-layer") == DAMPINGS[-1]
    assert not caplog.messages


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
