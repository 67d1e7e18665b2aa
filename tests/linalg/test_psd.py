"""Every factorisation on Grams that rounding left singular or indefinite, against NumPy's eigenvalues."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hostile_grams import HOSTILE, hostile_gram
from hypothesis import given
from hypothesis import strategies as st

from oneshot.architecture import TableShape
from oneshot.compression.correction import correct
from oneshot.compression.embedding import TokenRows, expanded, order_of_tokens, range_errors, reduce_embedding
from oneshot.compression.inner_heads import (
    query_key_errors,
    query_key_subspaces,
    value_errors,
    value_subspaces,
    with_smaller_scores,
)
from oneshot.compression.ranks import Inputs, Ranked
from oneshot.compression.statistics import Statistics
from oneshot.errors import CheckpointError
from oneshot.families import LLAMA
from oneshot.linalg.conjugate_gradients import conjugate_gradients
from oneshot.linalg.elimination import eliminate
from oneshot.linalg.interpolative import interpolate, nested_errors, ordered_factor, spanning_columns, trailing_norms
from oneshot.linalg.low_rank import ROOT_DAMPING, damped_root, product_energies, query_key_maps, roots, value_subspace
from oneshot.linalg.pca import energies_along, principal_directions
from oneshot.linalg.pivoted_qr import pivots_with_quota, weighted_pivots
from oneshot.linalg.psd import TRUSTED, GramNote, RidgeFactor, ridged_cholesky
from oneshot.selection import SELECTION_DAMPING, SELECTORS, Evidence

SIZE = 24
HALF = SIZE // 2

Gram = torch.Tensor

hostile = pytest.mark.parametrize(
    "gram", [hostile_gram(*each, size=SIZE) for each in HOSTILE], ids=map("-".join, HOSTILE)
)


def weight_of(rows: int, columns: int = SIZE) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))


def smallest_eigenvalue(gram: Gram) -> float:
    return float(np.linalg.eigvalsh(gram.double().numpy())[0])


def largest_ridge(gram: Gram, damping: float) -> float:
    """Return what the rule may add at most: ten times what makes every pivot larger than a tenth of the ridge."""
    asked = damping * float(gram.diagonal().double().mean())
    return max(asked, 10.0001 * -smallest_eigenvalue(gram) / (1 - TRUSTED), 1e-30)


def added_ridge(square: torch.Tensor, gram: Gram) -> float:
    """Return λ of `square = gram + λI`, after checking that nothing else was added."""
    added = square - gram.double()
    ridge = float(added.diagonal().mean())
    largest = float(square.abs().max())
    np.testing.assert_allclose(added.numpy(), ridge * np.eye(len(gram)), rtol=1e-6, atol=1e-13 * largest + 1e-300)
    return ridge


def assert_finite(*tensors: torch.Tensor) -> None:
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)


def statistics_of(gram: Gram, rows: int) -> Statistics:
    residual = torch.randn(len(gram), rows, generator=torch.Generator().manual_seed(4)) * gram.abs().max().sqrt()
    return Statistics(gram, residual, torch.tensor(1.0, dtype=torch.float64), 100, 100)


@hostile
def test_roots_of_damped_grams(gram: Gram) -> None:
    root = damped_root(gram, "inputs")
    assert torch.equal(root, root.tril())
    ridge = added_ridge(root @ root.T, gram)
    assert ridge <= largest_ridge(gram, ROOT_DAMPING) * 1.001
    # its inverse is used, so no direction may be nearly free; the smallest pivot is near the smallest eigenvalue
    assert float(torch.linalg.svdvals(root)[-1]) ** 2 >= TRUSTED / 4 * ridge


@hostile
def test_factors_of_error_curves(gram: Gram) -> None:
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))
    factor, weight = ordered_factor(gram, order), weight_of(7)
    assert torch.equal(factor, factor.triu())
    assert added_ridge(factor.T @ factor, gram[order][:, order]) <= largest_ridge(gram, 1e-7) * 1.001
    errors, tails = nested_errors(factor, weight), trailing_norms(factor, torch.ones(SIZE))
    assert_finite(errors, tails)
    assert bool((errors.diff() <= 0).all())
    assert 0 <= float(errors[-1]) <= float(errors[0]) <= 1


@hostile
@pytest.mark.parametrize("damping", [0.0, 1e-6, 1e-2])
def test_ridge_systems_are_solved_with_a_ridge_above_the_rounding(gram: Gram, damping: float) -> None:
    factor = RidgeFactor(gram, damping)
    inverse = factor.solve(torch.eye(SIZE))
    assert_finite(inverse)
    assert np.isfinite(factor.condition_number)
    largest, smallest = float(torch.linalg.eigvalsh(inverse).abs().max()), smallest_eigenvalue(gram)
    if factor.eigenvalue_fallback:
        assert damping == 0 or not gram.any()
        assert largest <= 1.001 / max(-smallest, 1e-300)
        return
    assert float(factor.ridge) <= largest_ridge(gram, damping) * 1.001
    solved = np.linalg.inv(gram.double().numpy() + float(factor.ridge) * np.eye(SIZE))
    scale = np.abs(solved).max() * factor.condition_number
    np.testing.assert_allclose(inverse.numpy(), solved, atol=1e-12 * scale)


@given(share=st.floats(1e-6, 0.9), seed=st.integers(0, 1000))
def test_a_ridge_that_only_just_holds_is_raised(share: float, seed: int) -> None:
    """A negative eigenvalue slightly smaller than the ridge would become an eigenvalue as near to zero as one likes."""
    vectors = np.linalg.qr(np.random.default_rng(seed).standard_normal((8, 8)))[0]
    values = np.array([5.0, 4, 3, 3, 2, 2, 1, 0])
    values[-1] = -1e-2 * 20 / 8 * (1 - 1e-3 * share)
    gram = torch.from_numpy(vectors * values @ vectors.T)
    factor = RidgeFactor((gram + gram.T) / 2, 1e-2)
    assert factor.damping == pytest.approx(1e-1)
    assert factor.condition_number < 100


@hostile
def test_roots_inside_heads(gram: Gram) -> None:
    root, inverse = roots(gram)
    if gram.any():
        np.testing.assert_allclose((root @ inverse).numpy(), np.eye(SIZE), atol=1e-5)
    assert_finite(root, inverse)
    other = weight_of(30)
    for left, right in ((gram, other.T @ other), (other.T @ other, gram), (gram, gram)):
        basis, embedding = value_subspace(left, right, 5)
        np.testing.assert_allclose((basis.T @ basis).numpy(), np.eye(5), atol=1e-10)
        energies = product_energies(left, right)
        assert_finite(embedding, energies, *query_key_maps(left, right, 5))
        assert bool((energies >= 0).all())


@hostile
def test_maps_of_queries_keys_and_values(gram: Gram) -> None:
    grams, full = torch.stack((gram, gram.flip(0, 1))), torch.block_diag(gram, gram)
    errors = query_key_errors(grams, grams, rotary=False)
    maps = query_key_subspaces(grams, grams, size=6, rotary=False)
    attention = LLAMA.stack.attention
    linears = {f"{linear}.weight": weight_of(2 * SIZE, 9) for linear in (attention.q, attention.k)}
    folded, inner = with_smaller_scores(linears, attention, 1, maps)
    assert inner.queries is not None
    assert_finite(errors, *(map_ for map_ in maps if map_ is not None), *folded.values(), inner.queries)
    weight = weight_of(11, 2 * SIZE)
    options = {"num_groups": 2, "head_dim": SIZE}
    assert_finite(value_errors(weight, full, **options))
    assert_finite(*value_subspaces(weight, full, **options, size=6, correct=True, damping=1e-2))


@hostile
def test_linears_of_low_rank(gram: Gram) -> None:
    weight = weight_of(40)
    linear = Ranked(weight, Inputs(gram), torch.ones(40))
    errors = linear.errors()
    assert_finite(errors)
    assert 0 <= float(errors[-1]) <= float(errors[0]) <= 1
    np.testing.assert_allclose(linear.nearest(SIZE).whole(torch.float32).numpy(), weight.numpy(), atol=1e-3)
    read, others, order = linear.nearest(HALF).columns()
    assert_finite(read, others)
    assert sorted(order.tolist()) == list(range(SIZE))


@hostile
def test_vocabularies_of_low_rank(gram: Gram) -> None:
    rows = TokenRows(weight_of(64), gram.double(), torch.full((64,), 1 / 64), marks=(5, 60))
    order = order_of_tokens(rows)
    assert sorted(order.tolist()) == list(range(64))
    errors = range_errors(rows, order)
    assert_finite(errors[:, HALF:])
    tables = tuple(TableShape(64 // len(errors), HALF) for _ in errors)
    reduced = reduce_embedding(rows, order, tables)
    assert_finite(expanded(reduced, SIZE))


@hostile
@pytest.mark.parametrize("damping", [0.0, 1e-6, 1e-2])
def test_corrections(gram: Gram, damping: float) -> None:
    kept, weight = torch.arange(0, SIZE, 2), weight_of(6)
    statistics = statistics_of(gram, 6)
    for correction in ("same-layer", "two-stream"):
        factors = correct(weight, kept, statistics, correction=correction, damping=damping)
        assert factors.predicted_error is not None
        assert_finite(factors.weight, torch.tensor([factors.predicted_error, factors.max_interpolation or 0.0]))
        assert factors.damping is not None
        assert factors.damping >= damping
    result = interpolate(gram, kept, damping)
    assert sorted([*kept.tolist(), *result.rest.tolist()]) == list(range(SIZE))


@hostile
def test_choices_of_columns(gram: Gram) -> None:
    weight = weight_of(6)
    evidence = Evidence(weight, None, gram, torch.Generator())
    for block, classes in ((1, None), (3, None), (3, torch.arange(8) // 4)):
        kept = eliminate(gram, weight, kept=2, block_size=block, class_of=classes, damping=SELECTION_DAMPING)
        assert len(set(kept.tolist())) == len(kept) == (2 if classes is None else 4)
    for pivoting in ("cholesky", "grouped", "tournament"):
        pivots = weighted_pivots(gram, torch.ones(SIZE), rank=HALF, pivoting=pivoting, group_size=8)
        assert len(set(pivots.tolist())) == HALF
    assert len(set(SELECTORS["obs"].neurons(evidence, HALF).tolist())) == HALF
    assert len(set(pivots_with_quota(gram, torch.arange(SIZE) % 2, quota=5).tolist())) == 10


@hostile
def test_principal_directions(gram: Gram) -> None:
    directions = principal_directions(gram)
    np.testing.assert_allclose((directions.T @ directions).numpy(), np.eye(SIZE), atol=1e-10)
    assert_finite(energies_along(gram, directions))


@hostile
def test_conjugate_gradients_behind_such_a_preconditioner(gram: Gram) -> None:
    left, right = RidgeFactor(gram, 1e-2), weight_of(SIZE)
    step = conjugate_gradients(right, lambda x: gram @ x, lambda x: left.solve(x).float(), steps=4)
    assert_finite(step)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_spanning_columns_of_any_rank(rows: int) -> None:
    """A linear that is zero, or of less rank than it keeps, has columns that span it."""
    matrix = weight_of(8, rows).double() @ weight_of(rows, 20).double()
    columns, others, coefficients = spanning_columns(matrix)
    np.testing.assert_allclose((matrix[:, columns] @ coefficients).numpy(), matrix[:, others].numpy(), atol=1e-9)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("factorise", [lambda gram: RidgeFactor(gram, 1e-2), lambda gram: damped_root(gram, "inputs")])
def test_what_is_not_finite_is_refused(value: float, factorise: Callable[[Gram], object]) -> None:
    gram = torch.eye(4)
    gram[2, 1] = gram[1, 2] = value
    with pytest.raises(CheckpointError, match="NaN or Inf"):
        factorise(gram)


def test_a_gram_that_a_ridge_changed_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    gram = hostile_gram("rank n/2", "massive direction", "tensor cores", size=SIZE)
    with caplog.at_level(logging.WARNING):
        damped_root(gram, "things")
    [record] = caplog.records
    note = vars(record)["gram_note"]
    assert isinstance(note, GramNote)
    assert (note.of, note.kind) == ("things", "raised")
    assert note.size > ROOT_DAMPING


def test_healthy_grams_keep_their_ridge(caplog: pytest.LogCaptureFixture) -> None:
    gram = hostile_gram("full rank", "plain", "float32", size=SIZE)
    with caplog.at_level(logging.WARNING):
        found = ridged_cholesky(gram, 1e-4, of="columns")
    assert found is not None
    assert found[1] == 1e-4
    assert caplog.records == []
