"""Pivots as a device takes them, on any device: against LAPACK's `dpstrf` and SciPy, column by column."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import grams, seeded, tall_or_wide
from oneshot_kernels import cholesky_pivots_, pivoted_cholesky
from oneshot_kernels.pivoted_qr.cholesky import blocked_pivoted_cholesky
from oneshot_kernels.pivoted_qr.factor import columns_without, suffix_sums
from oneshot_kernels.pivoted_qr.panels import WIDTH, eliminate_
from oneshot_kernels.pivoted_qr.randomized import greedy_pivots
from scipy.linalg import cholesky, lapack, qr
from tolerances import EPS


def by_lapack(gram: torch.Tensor) -> tuple[list[int], int]:
    """Return `dpstrf`'s (order of all columns, numerical rank), with the tolerance that we use."""
    array = gram.cpu().numpy()
    tolerance = len(array) * EPS * array.diagonal().max()
    _, order, rank, _ = lapack.dpstrf(array, tol=tolerance, lower=1)
    return (order - 1).tolist(), int(rank)


def matrix_of(kind: str, num_columns: int, num_rows: int) -> torch.Tensor:
    """Return fp64 [num_rows, num_columns]; whole numbers wherever equal columns have to stay equal."""
    generator = seeded(num_columns)
    whole = torch.randint(-9, 10, (num_rows, num_columns), generator=generator).double()
    if kind == "duplicates":
        return whole[:, torch.randint(0, num_columns, (num_columns,), generator=generator)]
    if kind == "zero columns":
        return whole * (torch.rand(num_columns, generator=generator) < 0.5)
    normal = torch.randn(num_rows, num_columns, dtype=torch.float64, generator=generator)
    if kind == "rank-deficient":
        return normal[:, : num_columns // 3] @ torch.randn(
            num_columns // 3, num_columns, dtype=torch.float64, generator=generator
        )
    if kind == "graded":
        return (
            normal
            * torch.logspace(0, -4, num_columns, dtype=torch.float64)[torch.randperm(num_columns, generator=generator)]
        )
    return normal


@pytest.mark.parametrize("kind", ["full", "graded", "rank-deficient", "duplicates", "zero columns"])
@pytest.mark.parametrize(("num_columns", "num_rows"), [(1, 3), (50, 200), (129, 60), (150, 700)])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_the_pivots_are_those_of_lapack(kind: str, num_columns: int, num_rows: int, width: int) -> None:
    matrix = matrix_of(kind, num_columns, num_rows)
    gram = matrix.mT @ matrix
    order, rank = by_lapack(gram)
    done = eliminate_(gram.clone(), num_columns, width=width)
    assert int(done.found()) == rank
    ours = done.order[:rank].tolist()
    if kind == "duplicates":  # which of two equal columns comes first is decided by rounding, there as here
        columns = matrix.mT.tolist()
        assert [columns[i] for i in ours] == [columns[i] for i in order[:rank]]
    else:
        assert done.order.tolist() == order
    assert done.pivots().tolist() == ours + sorted(set(order) - set(ours))
    half = num_columns // 2
    assert eliminate_(gram.clone(), half, width=width).order[:half].tolist() == done.order[:half].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["full", "graded", "rank-deficient", "duplicates", "zero columns"])
def test_one_kernel_a_pivot_takes_what_many_take(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    """Several tiles, several panels and several Grams at once; torch's kernels are held against LAPACK above."""
    triton_panel = pytest.importorskip("oneshot_kernels.pivoted_qr.triton_panel")
    monkeypatch.setattr(triton_panel, "TILE", 4)
    matrices = [matrix_of(kind, 7, num_rows) for num_rows in (4, 40)]
    grams = torch.stack([matrix.mT @ matrix for matrix in matrices]).to(dtype)
    want = eliminate_(grams.clone(), 6, width=4)
    monkeypatch.setenv("ONESHOT_KERNELS", "triton")
    done = eliminate_(grams.clone(), 6, width=4)
    found = want.found().tolist()
    assert done.found().tolist() == found
    assert done.order.tolist() == want.order.tolist()
    torch.testing.assert_close(done.sizes, want.sizes, rtol=len(grams[0]) * torch.finfo(dtype).eps * 100, atol=0)
    left = [(done.remainder[i], want.remainder[i], want.order[i, found[i] :]) for i in range(2)]
    for ours, theirs, rest in left:
        assert float((ours - theirs)[rest].abs().max()) <= 100 * torch.finfo(dtype).eps * float(grams.amax())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_kernel_a_pivot_makes_the_same_rows(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Of R, against SciPy's Cholesky of the permuted Gram."""
    if backend == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("ONESHOT_KERNELS", backend)
    matrix = matrix_of("full", 11, 30)
    gram = matrix.mT @ matrix
    rows = torch.empty(9, 11, dtype=torch.float64)
    order = eliminate_(gram.clone(), 9, rows=rows, width=4).order
    upper = cholesky(gram[order][:, order].cpu().numpy())
    np.testing.assert_allclose(rows[:, order].cpu().numpy(), upper[:9], rtol=1e-9, atol=1e-9)


@given(count=st.integers(1, 4), num_columns=st.integers(1, 24), width=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_many_grams_at_once_are_each_on_their_own(count: int, num_columns: int, width: int, seed: int) -> None:
    normal = torch.randn(count, num_columns + 3, num_columns, dtype=torch.float64, generator=seeded(seed))
    half = num_columns // 2
    normal[0, :, half:] = normal[0, :, :half] @ normal[0, :half, half:]  # half of its rank
    grams = normal.mT @ normal
    done = eliminate_(grams.clone(), num_columns, width=width)
    for index, gram in enumerate(grams):
        order, rank = by_lapack(gram)
        assert int(done.found()[index]) == rank
        assert done.order[index, :rank].tolist() == order[:rank]
        alone = eliminate_(gram.clone(), num_columns, width=width)
        assert done.pivots()[index].tolist() == alone.pivots().tolist()
        chosen = cholesky_pivots_(grams.clone(), rank=rank)[index]
        assert chosen.tolist() == order[:rank]


def test_nothing_is_taken_after_a_pivot_that_is_rounding() -> None:
    """Also where the next panel would find its rounding larger: LAPACK ends there."""
    matrix = matrix_of("rank-deficient", 30, 50)
    for width in (1, 2, 9, 11):
        sizes = eliminate_(matrix.mT @ matrix, 30, width=width).sizes
        assert sizes.isfinite().tolist() == [True] * 10 + [False] * 20


def test_equal_columns_are_taken_in_the_order_of_lapack() -> None:
    """The exchanges count: after the first pivot column 0 stands behind its equals 1 and 2."""
    gram = torch.diag(torch.tensor([1.0, 1.0, 1.0, 4.0], dtype=torch.float64))
    order, _ = by_lapack(gram)
    assert eliminate_(gram, 4).order.tolist() == order == [3, 1, 2, 0]


@given(gram=grams(), width=st.integers(1, 9), fraction=st.floats(0, 1))
def test_the_factor_is_that_of_lapack(gram: torch.Tensor, width: int, fraction: float) -> None:
    """In the same order of columns: R is unique there, and so are the errors."""
    count = int(fraction * len(gram))
    factor = blocked_pivoted_cholesky(gram, count, width)
    assert factor.factorised_rank <= count
    permuted = gram[factor.pivots][:, factor.pivots]
    found = factor.factorised_rank
    left = permuted - factor.r.mT @ factor.r
    size = float(gram.diagonal().max())
    assert float(left[:found].abs().max() if found else 0.0) <= 50 * len(gram) * EPS * size
    measured = left.diagonal()[found:].clamp_min(0).sum().sqrt()
    assert abs(float(factor.trailing_errors[found] - measured)) <= 10 * (len(gram) * EPS * size) ** 0.5
    assert pivoted_cholesky(gram, rank=count).factorised_rank == found


def test_the_factor_in_float32() -> None:
    matrix = matrix_of("graded", 70, 300)
    order = qr(matrix.cpu().numpy(), mode="r", pivoting=True)[1]
    gram = (matrix.mT @ matrix).float()
    assert eliminate_(gram.clone(), 10).order[:10].tolist() == order[:10].tolist()
    factor = blocked_pivoted_cholesky(gram, 20, WIDTH)
    assert factor.r.dtype == torch.float32
    np.testing.assert_allclose(
        (factor.r.mT @ factor.r).diagonal()[:20].cpu().numpy(),
        gram.diagonal()[factor.pivots[:20]].cpu().numpy(),
        rtol=1e-5,
    )


@given(matrix=tall_or_wide())
def test_the_panel_of_a_sketch_is_that_of_geqp3(matrix: torch.Tensor) -> None:
    """|R|'s diagonal is what the pivots are chosen by; columns that tie within rounding may change places."""
    chosen, r = greedy_pivots(matrix, 24, 1e-9 * float(matrix.norm()))
    theirs, pivots = qr(matrix.cpu().numpy(), mode="r", pivoting=True)
    count = len(chosen)
    np.testing.assert_allclose(
        r.diagonal().abs().cpu().numpy(), np.abs(theirs.diagonal()[:count]), rtol=1e-6, atol=1e-8 * float(matrix.norm())
    )
    assert bool((r.diagonal()[1:].abs() <= r.diagonal()[:-1].abs() * (1 + 1e-9)).all())
    assert len(set(chosen.tolist())) == count
    if count and len(set(np.round(np.linalg.norm(matrix.cpu().numpy(), axis=0), 9))) == matrix.shape[1]:
        assert int(chosen[0]) == pivots[0]


@given(st.integers(0, 30), st.integers(0, 2**16))
def test_columns_without_those_taken(count: int, seed: int) -> None:
    taken = torch.randperm(count, generator=seeded(seed))[: count // 3]
    assert columns_without(taken, count).tolist() == [i for i in range(count) if i not in taken.tolist()]


@given(st.lists(st.floats(0, 1e12), max_size=40))
def test_suffix_sums(values: list[float]) -> None:
    want = np.append(np.cumsum(np.array(values)[::-1])[::-1], 0.0)
    np.testing.assert_allclose(suffix_sums(torch.tensor(values, dtype=torch.float64)).cpu().numpy(), want, rtol=1e-13)
