"""Sums over batches: NumPy's numbers, and the same bits in every order of the batches."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oneshot_kernels.count_sketch import reference

from oneshot.linalg.sums import (
    PANEL_WIDTH,
    TOKENS_TRANSPOSED,
    add_gram_,
    add_product_,
    add_sketch_,
    as_float32,
    finished_gram,
)

SKETCH_SIZE = 24
ROWS = 16

Add = Callable[[torch.Tensor, torch.Tensor, int], None]
# name -> (shape of the total for n columns, how the batch with this index is added)
SUMS: dict[str, tuple[Callable[[int], tuple[int, int]], Add]] = {
    "gram": (lambda n: (n, n), lambda total, rows, _: add_gram_(total, rows)),
    "product": (lambda n: (n, 5), lambda total, rows, _: add_product_(total, rows, rows[:, :5].flip(0))),
    "sketch": (
        lambda n: (SKETCH_SIZE, n),
        lambda total, rows, index: add_sketch_(total, rows, row_offset=ROWS * index, seed=3, nonzeros=8),
    ),
}


def uneven_batches(num_batches: int, columns: int, seed: int) -> torch.Tensor:
    """Return batches `(batches, ROWS, columns)` whose columns and batches have very different sizes, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_batches, ROWS, columns, generator=generator)
    rows *= torch.logspace(-2, 2, columns)[torch.randperm(columns, generator=generator)]
    rows *= torch.logspace(-1, 1, num_batches).view(-1, 1, 1)
    return rows.where(torch.rand(rows.shape, generator=generator) < 0.9, 0.0)


@pytest.mark.parametrize("name", SUMS)
@given(seed=st.integers(0, 10**6), num_batches=st.integers(2, 8), processes=st.integers(2, 3))
def test_any_order_of_batches_gives_the_same_bits(name: str, seed: int, num_batches: int, processes: int) -> None:
    """One after the other, backwards, and as several processes sum their own parts."""
    batches = uneven_batches(num_batches, 12, seed)
    shape, add = SUMS[name]

    def total(indices: range) -> torch.Tensor:
        result = torch.zeros(shape(12), dtype=torch.float64)
        for index in indices:
            add(result, batches[index], index)
        return result

    edges = [part * num_batches // processes for part in range(processes + 1)]
    shares = [total(range(start, stop)) for start, stop in itertools.pairwise(edges)]
    expected = as_float32(total(range(num_batches)))
    assert torch.equal(as_float32(total(range(num_batches)[::-1])), expected)
    assert torch.equal(as_float32(torch.stack(shares).sum(0)), expected)
    assert torch.equal(as_float32(torch.stack(shares[::-1]).sum(0)), expected)


@pytest.mark.parametrize("columns", [7, PANEL_WIDTH + 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_numpys(columns: int, dtype: torch.dtype) -> None:
    batches = uneven_batches(3, columns, 0).to(dtype)
    gram, product = (torch.zeros(columns, size, dtype=torch.float64) for size in (columns, 4))
    sketch = torch.zeros(SKETCH_SIZE, columns, dtype=torch.float64)
    for index, rows in enumerate(batches):
        add_gram_(gram, rows)
        add_product_(product, rows, rows[:, :4].float())
        add_sketch_(sketch, rows, row_offset=ROWS * index, seed=1, nonzeros=1)
    exact = batches.flatten(0, 1).double()
    expected_sketch = torch.zeros_like(sketch)
    reference.sketch_(expected_sketch, exact, 0, 1, 1)
    norms = np.linalg.norm(exact.numpy(), axis=0)
    for got, expected, scale in (
        (finished_gram(gram), exact.T @ exact, np.outer(norms, norms)),
        (as_float32(product), exact.T @ exact[:, :4], np.outer(norms, norms[:4])),
        (as_float32(sketch), expected_sketch, norms * len(exact) ** 0.5),
    ):
        assert got.dtype == torch.float32
        assert (np.abs(got.numpy() - expected.numpy()) <= 1e-6 * scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (TOKENS_TRANSPOSED + 70, PANEL_WIDTH + 64), (5, 7)])
def test_onednn_sums_as_numpy(rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply tiles of transposed rows by oneDNN, and what does not fit by MKL."""
    for module in ("sums", "products"):
        monkeypatch.setattr(f"oneshot.linalg.{module}.mkl_is_narrow", lambda: True)
    left = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    right = left[:, : columns // 2 + 1].flip(0)
    gram, product = torch.ones(columns, columns).double(), torch.ones(columns, right.shape[1]).double()
    with torch.inference_mode():
        add_gram_(gram, left)
        add_product_(product, left, right)
    exact = left.double().numpy()
    np.testing.assert_allclose(gram.triu(), np.triu(exact.T @ exact + 1), atol=1e-3, rtol=1e-5)
    np.testing.assert_allclose(product, exact.T @ right.double().numpy() + 1, atol=1e-3, rtol=1e-5)
