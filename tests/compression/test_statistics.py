"""Statistics are sums: the same numbers for all batches, orders and workers."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import TOLERANCES, Matrix, matrices

from oneshot.compression.statistics import (
    GramAccumulator,
    HeadGramAccumulator,
    MomentAccumulator,
    SketchAccumulator,
    SplitAccumulator,
    with_constant_column,
)

CPU = torch.device("cpu")


def accumulate(rows: torch.Tensor, lost: torch.Tensor, cuts: list[int]) -> GramAccumulator:
    accumulator = GramAccumulator(rows.shape[1], output_size=lost.shape[1], device=CPU)
    edges = [0, *sorted(cuts), len(rows)]
    for start, stop in itertools.pairwise(edges):
        accumulator.update_(rows[start:stop], lost[start:stop])
    return accumulator


def assert_sums(accumulator: GramAccumulator, rows: Matrix, lost: Matrix) -> None:
    """Check that `finish` returns `AᵀA`, `AᵀL` and `‖L‖²` over all rows, `L` what each lacks of its target."""
    statistics = accumulator.finish()
    largest = max(float(np.abs(part).max()) for part in (rows, lost))
    for got, expected in (
        (statistics.gram, rows.T @ rows),
        (statistics.residual, rows.T @ lost),
        (statistics.residual_energy, np.square(lost).sum()),
    ):
        assert got is not None
        assert np.abs(got.numpy() - expected).max() <= TOLERANCES["float32 sums"] * largest**2 * rows.size
    assert statistics.num_rows == statistics.num_targets == len(rows)


@given(matrix=matrices(), seed=st.integers(0, 100), cuts=st.lists(st.integers(0, 16), max_size=4))
def test_sums_do_not_depend_on_batches(matrix: Matrix, seed: int, cuts: list[int]) -> None:
    lost = np.random.default_rng(seed).standard_normal((len(matrix), 5))
    cuts = [min(cut, len(matrix)) for cut in cuts]
    accumulator = accumulate(torch.from_numpy(matrix), torch.from_numpy(lost), cuts)
    assert_sums(accumulator, matrix, lost)


@given(matrix=matrices(), seed=st.integers(0, 100), cut=st.integers(0, 30))
def test_merged_sums_equal_sums_over_all_rows(matrix: Matrix, seed: int, cut: int) -> None:
    lost = np.random.default_rng(seed).standard_normal((len(matrix), 5))
    rows, lacking = torch.from_numpy(matrix), torch.from_numpy(lost)
    cut = min(cut, len(matrix))
    first, second = accumulate(rows[:cut], lacking[:cut], []), accumulate(rows[cut:], lacking[cut:], [])
    first.merge_(second)
    assert_sums(first, matrix, lost)


def test_a_target_cannot_be_forgotten() -> None:
    accumulator = GramAccumulator(3, output_size=2, device=CPU)
    accumulator.update_(torch.ones(4, 3))
    with pytest.raises(ValueError, match="no row had a target"):
        accumulator.finish()


@given(seed=st.integers(0, 100), num_targets=st.integers(1, 7))
def test_rows_with_a_target_stand_for_the_others(seed: int, num_targets: int) -> None:
    """The residual of some batches is scaled to all rows, and the Gram is of all rows."""
    rng = np.random.default_rng(seed)
    rows, lost = rng.standard_normal((8, 3, 4)), rng.standard_normal((num_targets, 3, 5))
    accumulator = GramAccumulator(4, output_size=5, device=CPU)
    for number, batch in enumerate(torch.from_numpy(rows)):
        accumulator.update_(batch, torch.from_numpy(lost[number]) if number < num_targets else None)
    statistics = accumulator.finish()
    assert (statistics.num_rows, statistics.num_targets) == (8 * 3, num_targets * 3)
    residual = 8 / num_targets * np.einsum("bri,brj->ij", rows[:num_targets], lost)
    np.testing.assert_allclose(statistics.gram, np.einsum("bri,brj->ij", rows, rows), atol=1e-4)
    assert statistics.residual is not None
    np.testing.assert_allclose(statistics.residual, residual, atol=1e-4)
    assert float(statistics.residual_energy) == pytest.approx(8 / num_targets * np.square(lost).sum(), rel=1e-4)


@given(seed=st.integers(0, 100), num_rows=st.integers(1, 700), cut=st.integers(0, 700), targeted=st.booleans())
def test_every_ninth_block_is_also_summed_alone(seed: int, num_rows: int, cut: int, targeted: bool) -> None:
    """However rows come in batches, or workers share them."""
    rng, cut = np.random.default_rng(seed), min(cut, num_rows)
    rows, lost = (rng.standard_normal((num_rows, columns)) for columns in (4, 5))
    options: dict[str, Any] = {"output_size": 5 if targeted else None, "device": CPU}
    batches = torch.from_numpy(rows).split([cut, num_rows - cut]), torch.from_numpy(lost).split([cut, num_rows - cut])
    whole, second = SplitAccumulator(4, **options), SplitAccumulator(4, **options, row_offset=cut)
    for number, (batch, lacking) in enumerate(zip(*batches, strict=True)):
        for accumulator in (whole, second)[: number + 1]:
            accumulator.update_(batch, lacking if targeted else None)
    statistics, held_out = whole.finish(), np.arange(num_rows) // 32 % 9 == 0
    assert statistics.held_out is not None
    for got, slice_ in ((statistics, slice(None)), (statistics.held_out, held_out)):
        activations, residual = rows[slice_], lost[slice_]
        assert got.num_rows == len(activations)
        np.testing.assert_allclose(got.gram, activations.T @ activations, rtol=1e-5, atol=1e-4)
        assert (got.residual is not None) == targeted
        if got.residual is not None:
            np.testing.assert_allclose(got.residual, activations.T @ residual, rtol=1e-5, atol=1e-4)
            assert float(got.residual_energy) == pytest.approx(np.square(residual).sum(), rel=1e-5, abs=1e-3)
    if not targeted:
        later = second.finish().held_out
        assert later is not None
        assert later.num_rows == held_out[cut:].sum()


def test_bfloat16_rows_are_summed_in_float32() -> None:
    rows = torch.randn(2000, 8).bfloat16()
    accumulator = GramAccumulator(8, output_size=None, device=CPU)
    for batch in rows.split(100):
        accumulator.update_(batch)
    statistics = accumulator.finish()
    expected = rows.double().T @ rows.double()
    assert statistics.gram.dtype == torch.float32
    assert float((statistics.gram - expected).abs().max() / expected.max()) < 1e-5
    assert statistics.residual is None
    assert float(statistics.residual_energy) == 0


def test_the_constant_column_holds_sums_and_count() -> None:
    rows = torch.randn(50, 6, dtype=torch.float64)
    accumulator = GramAccumulator(7, output_size=None, device=CPU)
    accumulator.update_(with_constant_column(rows))
    gram = accumulator.finish().gram
    np.testing.assert_allclose(gram[-1, :-1].numpy(), rows.sum(0).numpy(), rtol=1e-4, atol=1e-4)
    assert float(gram[-1, -1]) == 50


@pytest.mark.parametrize("nonzeros", [1, 4])
@given(matrix=matrices(), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_sketches_do_not_depend_on_batches_or_workers(nonzeros: int, matrix: Matrix, cuts: list[int]) -> None:
    rows = torch.from_numpy(matrix).float()
    whole = SketchAccumulator(8, rows.shape[1], nonzeros=nonzeros, seed=3, device=CPU)
    whole.update_(rows)
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    batched = SketchAccumulator(8, rows.shape[1], nonzeros=nonzeros, seed=3, device=CPU)
    workers = torch.zeros(8, rows.shape[1])
    for start, stop in itertools.pairwise(edges):
        batched.update_(rows[start:stop])
        worker = SketchAccumulator(8, rows.shape[1], nonzeros=nonzeros, seed=3, device=CPU, row_offset=start)
        worker.update_(rows[start:stop])
        workers += worker.finish()
    for got in (batched.finish(), workers):
        scale = float(rows.abs().max()) * len(rows)
        assert float((got - whole.finish()).abs().max()) <= TOLERANCES["float32 sums"] * scale


def test_a_count_sketch_has_one_sign_per_row() -> None:
    """The sketch of the identity is `S` itself, with one ±1 in each column; another seed gives another `S`."""
    identity = torch.eye(40)
    matrices = []
    for seed in (0, 1):
        sketch = SketchAccumulator(8, 40, nonzeros=1, seed=seed, device=CPU)
        sketch.update_(identity)
        matrices.append(sketch.finish())
        assert (matrices[-1].abs().sum(0) == 1).all()
        assert set(matrices[-1].unique().tolist()) == {-1.0, 0.0, 1.0}
    assert not torch.equal(matrices[0], matrices[1])


@given(matrix=matrices(), cut=st.integers(0, 16))
def test_moments_equal_numpys(matrix: Matrix, cut: int) -> None:
    rows = torch.from_numpy(matrix)
    accumulator = MomentAccumulator(rows.shape[1], device=CPU)
    accumulator.update_(rows[:cut])
    accumulator.update_(rows[cut:])
    moments = accumulator.finish()
    single = matrix.astype(np.float32).astype(np.float64)
    scale = max(float(np.abs(single).max()), 1e-30)
    for got, expected in (
        (moments.mean, single.mean(0)),
        (moments.deviation, single.std(0)),
    ):
        assert np.abs(got.numpy() - expected).max() <= 1e-3 * scale


def test_grams_of_heads_equal_the_diagonal_blocks() -> None:
    rows = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    accumulator = HeadGramAccumulator(3, 4, device=CPU)
    accumulator.update_(rows[:20])
    accumulator.update_(rows[20:])
    gram = rows.double().T @ rows.double()
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        torch.testing.assert_close(accumulator.finish()[head].double(), gram[part, part], rtol=1e-5, atol=1e-5)
