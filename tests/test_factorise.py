"""Selection and correction against independent least squares, explicit columns and brute force."""

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import TOLERANCES, Matrix, matrices

from oneshot.factorise import correct, select_heads, select_neurons
from oneshot.records import BlockStatistics, Factors
from oneshot.statistics import GramAccumulator, MomentAccumulator, with_constant_column

ROWS, NEURONS, OUTPUTS = 120, 16, 6


def exact_statistics(activations: Matrix, residual_target: Matrix | None = None) -> BlockStatistics:
    """Sums in float64, by NumPy."""
    target = residual_target
    return BlockStatistics(
        gram=torch.from_numpy(activations.T @ activations),
        residual=None if target is None else torch.from_numpy(activations.T @ target),
        residual_energy=torch.tensor(0.0 if target is None else float(np.square(target).sum()), dtype=torch.float64),
        num_rows=len(activations),
    )


def problem(seed: int, *, bias: bool = False) -> tuple[Matrix, Matrix, torch.Tensor, Matrix]:
    """Correlated activations `A`, a weight `W`, kept columns `J`, and what the dense stream wants beyond `A Wᵀ`."""
    rng = np.random.default_rng(seed)
    activations = rng.standard_normal((ROWS, 5)) @ rng.standard_normal((5, NEURONS))
    activations += 0.3 * rng.standard_normal((ROWS, NEURONS)) + 0.5
    if bias:
        activations = np.column_stack([activations, np.ones(ROWS)])
    weight = rng.standard_normal((OUTPUTS, activations.shape[1]))
    kept = np.sort(rng.choice(NEURONS, size=int(rng.integers(2, NEURONS)), replace=False))
    if bias:
        kept = np.append(kept, NEURONS)
    residual = 0.2 * activations[:, :3] @ rng.standard_normal((3, OUTPUTS)) + 0.1 * rng.standard_normal((ROWS, OUTPUTS))
    return activations, weight, torch.from_numpy(kept), residual


def measured_error(activations: Matrix, factors: Factors, wanted: Matrix) -> float:
    reached = activations[:, factors.kept.numpy()] @ factors.weight.numpy().T
    return float(np.linalg.norm(wanted - reached) / np.linalg.norm(wanted))


def ridge_least_squares(activations: Matrix, kept: torch.Tensor, weight: Matrix, target: Matrix, damping: float) -> Any:
    """`min ‖target − A_J X‖² + λ‖X − W_Jᵀ‖²`, `λ = damping · mean ‖a_j‖²`, with stacked rows, by NumPy."""
    skeleton, prior = activations[:, kept.numpy()], weight[:, kept.numpy()].T
    root = np.sqrt(damping * np.square(skeleton).sum(0).mean())
    rows = np.vstack([skeleton, root * np.eye(len(kept))])
    return np.linalg.lstsq(rows, np.vstack([target, root * prior]), rcond=None)[0].T


@given(seed=st.integers(0, 5000), bias=st.booleans(), damping=st.sampled_from((1e-6, 1e-2, 0.5)))
def test_same_layer_equals_ridge_least_squares(seed: int, bias: bool, damping: float) -> None:
    activations, weight, kept, _ = problem(seed, bias=bias)
    factors = correct(
        torch.from_numpy(weight), kept, exact_statistics(activations), correction="same-layer", damping=damping
    )
    wanted = ridge_least_squares(activations, kept, weight, activations @ weight.T, damping)
    np.testing.assert_allclose(factors.weight.numpy(), wanted, rtol=1e-7, atol=1e-7)


@given(seed=st.integers(0, 5000), bias=st.booleans(), share=st.sampled_from((0.0, 0.5, 1.0)))
def test_two_stream_equals_ridge_least_squares_on_the_dense_target(seed: int, bias: bool, share: float) -> None:
    activations, weight, kept, residual = problem(seed, bias=bias)
    factors = correct(
        torch.from_numpy(weight),
        kept,
        exact_statistics(activations, residual),
        correction="two-stream",
        damping=1e-3,
        residual_weight=share,
    )
    target = activations @ weight.T + share * residual
    wanted = ridge_least_squares(activations, kept, weight, target, 1e-3)
    np.testing.assert_allclose(factors.weight.numpy(), wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("correction", ["none", "same-layer", "two-stream"])
@given(seed=st.integers(0, 5000), bias=st.booleans())
def test_predicted_error_equals_measured_error(correction: str, seed: int, bias: bool) -> None:
    activations, weight, kept, residual = problem(seed, bias=bias)
    two_streams = correction == "two-stream"
    accumulator = GramAccumulator(
        activations.shape[1], output_size=OUTPUTS if two_streams else None, device=torch.device("cpu")
    )
    plain = torch.from_numpy(activations[:, :NEURONS])
    accumulator.update_(
        with_constant_column(plain) if bias else plain, torch.from_numpy(residual) if two_streams else None
    )
    factors = correct(torch.from_numpy(weight), kept, accumulator.finish(), correction=correction, damping=1e-2)
    wanted = activations @ weight.T + (residual if two_streams else 0)
    assert factors.predicted_error == pytest.approx(
        measured_error(activations, factors, wanted), rel=1e-3, abs=TOLERANCES["float32 error"]
    )


@pytest.mark.parametrize("correction", ["same-layer", "two-stream"])
@given(matrix=matrices(min_columns=6), seed=st.integers(0, 5000), damping=st.sampled_from((1e-8, 1e-4, 1e-2, 1.0)))
def test_correction_is_never_worse_than_none(correction: str, matrix: Matrix, seed: int, damping: float) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((OUTPUTS, matrix.shape[1]))
    residual = 0.3 * rng.standard_normal((len(matrix), OUTPUTS)) if correction == "two-stream" else None
    kept = torch.from_numpy(np.sort(rng.choice(matrix.shape[1], size=matrix.shape[1] // 2, replace=False)))
    statistics = exact_statistics(matrix, residual)
    plain = correct(torch.from_numpy(weight), kept, statistics, correction="none", damping=damping)
    corrected = correct(torch.from_numpy(weight), kept, statistics, correction=correction, damping=damping)
    wanted = matrix @ weight.T + (0 if residual is None else residual)
    assert measured_error(matrix, corrected, wanted) <= measured_error(matrix, plain, wanted) * (1 + 1e-9)


def test_no_correction_keeps_the_columns_as_they_are() -> None:
    activations, weight, kept, _ = problem(1)
    factors = correct(torch.from_numpy(weight), kept, exact_statistics(activations), correction="none", damping=0.1)
    np.testing.assert_array_equal(factors.weight.numpy(), weight[:, kept.numpy()])
    assert factors.condition_number is None
    assert factors.max_interpolation is None


def test_the_factors_name_the_condition_and_the_largest_coefficient() -> None:
    activations, weight, kept, _ = problem(2)
    factors = correct(
        torch.from_numpy(weight), kept, exact_statistics(activations), correction="same-layer", damping=1e-2
    )
    skeleton = activations[:, kept.numpy()]
    gram = skeleton.T @ skeleton
    system = gram + 1e-2 * np.diag(gram).mean() * np.eye(len(kept))
    rest = np.setdiff1d(np.arange(NEURONS), kept.numpy())
    interpolation = np.linalg.solve(system, skeleton.T @ activations[:, rest])
    assert factors.condition_number == pytest.approx(np.linalg.cond(system), rel=0.3)
    assert factors.max_interpolation == pytest.approx(np.abs(interpolation).max(), rel=1e-9)


def select(selector: str, kept_size: int, *, seed: int = 0) -> tuple[set[int], Matrix, Matrix, Matrix, Matrix]:
    rng = np.random.default_rng(11)
    gate, up, down = (rng.standard_normal(shape) for shape in ((NEURONS, 5), (NEURONS, 5), (5, NEURONS)))
    activations = rng.standard_normal((ROWS, NEURONS)) * rng.uniform(0.2, 3, NEURONS)
    kept = select_neurons(
        selector,
        kept_size,
        gate=torch.from_numpy(gate),
        up=torch.from_numpy(up),
        down=torch.from_numpy(down),
        gram=torch.from_numpy(activations.T @ activations),
        generator=torch.Generator().manual_seed(seed),
    )
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert len(kept) == kept_size
    return set(kept.tolist()), activations, gate, up, down


def largest(scores: Matrix, count: int) -> set[int]:
    return set(np.argsort(-scores)[:count].tolist())


@pytest.mark.parametrize("kept_size", [1, 7, NEURONS])
def test_selectors_equal_their_definitions(kept_size: int) -> None:
    kept, activations, _, _, down = select("id", kept_size)
    order = scipy.linalg.qr(activations * np.linalg.norm(down, axis=0), mode="r", pivoting=True)[1]
    assert kept == set(order[:kept_size].tolist())

    kept, activations, _, _, down = select("activation-norm", kept_size)
    assert kept == largest(np.linalg.norm(activations, axis=0) * np.linalg.norm(down, axis=0), kept_size)

    kept, _, gate, up, down = select("magnitude", kept_size)
    assert kept == largest(np.linalg.norm(np.hstack([gate, up, down.T]), axis=1), kept_size)


def test_random_neurons_follow_the_seed() -> None:
    assert select("random", 7, seed=1)[0] == select("random", 7, seed=1)[0]
    assert len({frozenset(select("random", 7, seed=seed)[0]) for seed in range(5)}) > 1


def explicit_heads(seed: int, groups: int, per_group: int, head_dim: int) -> tuple[Matrix, Matrix, Matrix]:
    """Head outputs `Z`, an `o_proj` weight, and the weighted heads as explicit long columns `(rows · h, H)`."""
    rng = np.random.default_rng(seed)
    width = groups * per_group * head_dim
    outputs, weight = rng.standard_normal((ROWS, width)), rng.standard_normal((OUTPUTS, width))
    outputs *= np.repeat(rng.uniform(0.5, 2, groups * per_group), head_dim)
    weighted = outputs * np.linalg.norm(weight, axis=0)
    columns = np.stack(
        [weighted[:, head * head_dim : (head + 1) * head_dim].ravel() for head in range(groups * per_group)], axis=1
    )
    return outputs, weight, columns


@given(seed=st.integers(0, 5000), groups=st.integers(2, 5), per_group=st.integers(1, 3))
def test_kv_groups_are_the_pivots_of_scipys_qr(seed: int, groups: int, per_group: int) -> None:
    outputs, weight, columns = explicit_heads(seed, groups, per_group, 4)
    kept_groups = max(1, groups - 1 - seed % 2)
    heads = select_heads(
        torch.from_numpy(outputs.T @ outputs),
        torch.from_numpy(weight),
        num_groups=groups,
        heads_per_group=per_group,
        head_dim=4,
        kept_groups=kept_groups,
        kept_heads_per_group=per_group,
    )
    long_groups = np.stack(
        [columns[:, group * per_group : (group + 1) * per_group].ravel() for group in range(groups)], axis=1
    )
    order = scipy.linalg.qr(long_groups, mode="r", pivoting=True)[1][:kept_groups]
    wanted = [head for group in sorted(order) for head in range(group * per_group, (group + 1) * per_group)]
    assert heads.tolist() == wanted


@given(seed=st.integers(0, 5000), per_group=st.integers(2, 6), kept=st.integers(1, 5))
def test_query_heads_of_one_group_are_the_pivots_of_scipys_qr(seed: int, per_group: int, kept: int) -> None:
    kept = min(kept, per_group)
    outputs, weight, columns = explicit_heads(seed, 1, per_group, 4)
    heads = select_heads(
        torch.from_numpy(outputs.T @ outputs),
        torch.from_numpy(weight),
        num_groups=1,
        heads_per_group=per_group,
        head_dim=4,
        kept_groups=1,
        kept_heads_per_group=kept,
    )
    order = scipy.linalg.qr(columns, mode="r", pivoting=True)[1][:kept]
    assert heads.tolist() == sorted(order.tolist())


@given(seed=st.integers(0, 5000), groups=st.integers(1, 4), per_group=st.integers(1, 4), whole_groups=st.booleans())
def test_every_kept_group_keeps_the_same_number_of_heads(
    seed: int, groups: int, per_group: int, whole_groups: bool
) -> None:
    outputs, weight, _ = explicit_heads(seed, groups, per_group, 2)
    outputs[:, : 2 * per_group] *= 100  # the first group alone would win every free choice
    kept_groups = max(1, groups - 1) if whole_groups else groups
    kept_each = per_group if whole_groups else max(1, per_group - 1)
    heads = select_heads(
        torch.from_numpy(outputs.T @ outputs),
        torch.from_numpy(weight),
        num_groups=groups,
        heads_per_group=per_group,
        head_dim=2,
        kept_groups=kept_groups,
        kept_heads_per_group=kept_each,
    )
    counts = (heads // per_group).bincount(minlength=groups).tolist()
    assert sorted(counts) == [0] * (groups - kept_groups) + [kept_each] * kept_groups
    assert heads.tolist() == sorted(set(heads.tolist()))


def test_the_tcsp_score_is_equation_25() -> None:
    rng = np.random.default_rng(5)
    activations = rng.standard_normal((300, NEURONS)) * rng.random(NEURONS) + rng.standard_normal(NEURONS)
    down = rng.standard_normal((OUTPUTS, NEURONS))
    score = np.linalg.norm(down, axis=0) * (np.abs(activations).mean(0) + activations.std(0))
    accumulator = MomentAccumulator(NEURONS, device=torch.device("cpu"))
    accumulator.update_(torch.from_numpy(activations))
    kept = select_neurons(
        "tcsp-score",
        6,
        gate=None,
        up=torch.zeros(NEURONS, 4),
        down=torch.from_numpy(down),
        gram=torch.from_numpy(activations.T @ activations),
        moments=accumulator.finish(),
        generator=torch.Generator(),
    )
    assert set(kept.tolist()) == set(np.argsort(-score)[:6].tolist())
