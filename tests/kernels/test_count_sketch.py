"""Sketches: against the dense reference, and what makes them sketches of a stream."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import seeded
from oneshot_kernels import sketch_
from oneshot_kernels.count_sketch import reference
from tolerances import TOLERANCE, assert_close

SHAPES = [
    (5, 7, 3),
    (1, 1, 1),
    (3, 200, 9),
    (70, 1, 40),
    (12, 5, 64),
]  # (m, n, s): odd, one column, m < n, empty places


def sketched(rows: torch.Tensor, size: int, dtype: torch.dtype = torch.float64, **how: int) -> torch.Tensor:
    return sketch_(torch.zeros(size, rows.shape[1], dtype=dtype), rows, **{"row_offset": 0, "seed": 3, **how})


@pytest.mark.parametrize(("num_rows", "num_columns", "size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_agrees_with_the_reference(
    fast_backend: str, generator: torch.Generator, num_rows: int, num_columns: int, size: int, dtype: torch.dtype
) -> None:
    nonzeros = min(2, size)
    rows = torch.randn(num_rows, num_columns, generator=generator).to(dtype)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    start = torch.randn(size, num_columns, generator=generator).to(accumulated)
    got = sketch_(start.clone(), rows, row_offset=11, seed=5, nonzeros=nonzeros)
    want = start.double()
    reference.sketch_(want, rows, 11, 5, nonzeros)
    assert_close(got, want, float(rows.double().norm()) + float(start.norm()), accumulated)


def test_strided_input_and_output(fast_backend: str, generator: torch.Generator) -> None:
    rows = torch.randn(14, 33, generator=generator).mT[::3]  # column-major and strided
    out = torch.zeros(14, 6).mT
    want = torch.zeros(6, 14, dtype=torch.float64)
    reference.sketch_(want, rows, 0, 9, 1)
    assert sketch_(out, rows, row_offset=0, seed=9) is out
    assert_close(out, want, float(rows.norm()), torch.float32)


def test_no_rows_changes_nothing(fast_backend: str) -> None:
    out = torch.ones(3, 4)
    assert torch.equal(sketch_(out, torch.zeros(0, 4), row_offset=0, seed=0), torch.ones(3, 4))


def test_same_call_gives_the_same_bits(fast_backend: str, generator: torch.Generator) -> None:
    rows = torch.randn(40, 20, generator=generator)
    first, second = (sketched(rows, 8, torch.float32, nonzeros=2) for _ in range(2))
    assert torch.equal(first, second)


@given(st.integers(1, 4), st.integers(0, 2**32), st.integers(1, 39))
def test_batches_merge_to_the_whole(nonzeros: int, seed: int, cut: int) -> None:
    rows = torch.randn(40, 6, dtype=torch.float64, generator=seeded(seed))
    whole = sketched(rows, 9, seed=seed, nonzeros=nonzeros)
    other_worker = sketched(rows[cut:], 9, row_offset=cut, seed=seed, nonzeros=nonzeros)
    merged = other_worker + sketched(rows[:cut], 9, seed=seed, nonzeros=nonzeros)
    assert_close(merged, whole, float(rows.norm()), torch.float64)


def test_whole_numbers_merge_bitwise(fast_backend: str, generator: torch.Generator) -> None:
    """Where sums are exact, batch boundaries cannot show at all."""
    rows = torch.randint(-8, 9, (24, 10), generator=generator).float()
    out = torch.zeros(5, 10)
    for start, stop in [(0, 5), (5, 6), (6, 24)]:
        sketch_(out, rows[start:stop], row_offset=start, seed=3)
    assert torch.equal(out, sketched(rows, 5, torch.float32))


def test_structure_of_the_embedding() -> None:
    embedding = torch.as_tensor(reference.embedding_matrix(10, 500, 0, 1, 3))
    for start, stop in [(0, 3), (3, 6), (6, 10)]:
        assert bool(((embedding[start:stop] != 0).sum(dim=0) == 1).all())
    torch.testing.assert_close(embedding.square().sum(dim=0), torch.ones(500, dtype=torch.float64))
    assert bool(((embedding != 0).sum(dim=1) > 75).all())  # every place is used: expected 125 or 167 each


def test_norms_are_kept_in_the_mean(generator: torch.Generator) -> None:
    rows = torch.randn(60, 1, dtype=torch.float64, generator=generator)
    for nonzeros in (1, 4):
        squares = [float(sketched(rows, 40, seed=seed, nonzeros=nonzeros).square().sum()) for seed in range(400)]
        mean = sum(squares) / len(squares) / float(rows.square().sum())
        assert abs(mean - 1) < 0.05  # variance of one is at most 2/40: 4 σ of the mean is 0.045


@pytest.mark.parametrize(
    ("out", "rows", "how"),
    [
        (torch.zeros(3, 4), torch.zeros(2, 5), {}),
        (torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(2, 4), {}),
        (torch.zeros(3, 4), torch.zeros(2, 4, dtype=torch.int64), {}),
        (torch.zeros(3, 4), torch.zeros(2, 4), {"nonzeros": 4}),
        (torch.zeros(3, 4), torch.zeros(2, 4), {"nonzeros": 0}),
        (torch.zeros(3, 4), torch.zeros(2, 4), {"row_offset": -1}),
    ],
)
def test_refuses_what_does_not_fit(out: torch.Tensor, rows: torch.Tensor, how: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"differ|fp32|outside|negative"):
        sketch_(out, rows, **{"row_offset": 0, "seed": 0, **how})


def test_tolerances_are_tight_enough_to_fail(generator: torch.Generator) -> None:
    """One wrong sign among 200 rows is far outside the table."""
    rows = torch.randn(200, 3, generator=generator)
    embedding = torch.as_tensor(reference.embedding_matrix(20, 200, 0, 3, 1))
    embedding[:, 17] *= -1
    error = float((embedding @ rows.double() - sketched(rows, 20, torch.float32)).norm())
    assert error > 1000 * TOLERANCE[torch.float32] * float(rows.norm())
