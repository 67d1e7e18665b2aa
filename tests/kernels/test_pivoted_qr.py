"""Every pivoted factorisation against plain NumPy, SciPy's geqp3, and what has to hold of any of them."""

from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import scipy.linalg.interpolative
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import grams, seeded, tall_or_wide, trailing_error
from oneshot_kernels import (
    PivotedFactor,
    cholesky_pivots_,
    grouped_pivots,
    pivoted_cholesky,
    pivoted_qr,
    tournament_pivots,
)
from oneshot_kernels.pivoted_qr import reference
from oneshot_kernels.pivoted_qr.cholesky import blocked_pivoted_cholesky
from oneshot_kernels.pivoted_qr.randomized import bqrrp, greedy_pivots, pivots_of_sketch, preconditioned_cholesky_qr
from tolerances import EXACT_RANK, GRAM_FLOOR

Factorise = Callable[[torch.Tensor], PivotedFactor]


def gram(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.mT @ matrix


def blocked(gram: torch.Tensor, *, rank: int | None = None, block_size: int = 128) -> PivotedFactor:
    """Return the torch version, which `pivoted_cholesky` calls on devices."""
    return blocked_pivoted_cholesky(gram, len(gram) if rank is None else rank, block_size)


def full(matrix: torch.Tensor) -> dict[str, int]:
    return {"group_size": 5, "rank": min(matrix.shape)}


FROM_GRAM: dict[str, Factorise] = {
    "cholesky": lambda a: pivoted_cholesky(gram(a)),
    "blocked cholesky": lambda a: blocked(gram(a), block_size=4),
    "reference cholesky": lambda a: reference.pivoted_cholesky(gram(a), a.shape[1]),
    "grouped, Gram": lambda a: grouped_pivots(gram=gram(a), **full(a)),
    "tournament, Gram": lambda a: tournament_pivots(gram=gram(a), **full(a)),
}
FROM_DATA: dict[str, Factorise] = {
    "lapack": lambda a: pivoted_qr(a, method="lapack"),
    "randomized": lambda a: pivoted_qr(a, method="randomized"),
    "randomized, blocks of 4": lambda a: bqrrp(a, min(a.shape), 0, block_size=4),
    "reference": lambda a: reference.pivoted_qr(a, min(a.shape)),
    "grouped, matrix": lambda a: grouped_pivots(matrix=a, **full(a)),
    "tournament, matrix": lambda a: tournament_pivots(matrix=a, **full(a)),
}
ALL = FROM_GRAM | FROM_DATA


def low_rank(rank: int, rows: int = 60, columns: int = 30) -> torch.Tensor:
    generator = seeded(rank)
    left = torch.randn(rows, rank, dtype=torch.float64, generator=generator)
    return left @ torch.randn(rank, columns, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", ALL)
@given(matrix=tall_or_wide())
def test_is_a_factorisation(name: str, matrix: torch.Tensor) -> None:
    """pivots permute, errors never rise and start at ‖A‖, r is trapezoidal, rᵀr is the Gram up to what is left."""
    factor = ALL[name](matrix)
    num_columns, size = matrix.shape[1], float(matrix.norm())
    assert sorted(factor.pivots.tolist()) == list(range(num_columns))
    errors = factor.trailing_errors
    assert errors.shape == (num_columns + 1,)
    assert errors.dtype == torch.float64
    assert bool(torch.isfinite(errors).all())
    assert bool((errors[1:] <= errors[:-1]).all())
    assert float(errors[-1]) == 0
    assert abs(float(errors[0]) - size) <= 1e-12 * size
    assert torch.equal(factor.r, factor.r.triu())
    left = gram(matrix[:, factor.pivots]) - gram(factor.r)
    unexplained = float(errors[factor.factorised_rank])
    assert float(left.norm()) <= unexplained**2 + 1e-13 * num_columns * size**2


@pytest.mark.parametrize("name", ALL)
@given(matrix=tall_or_wide(), fraction=st.floats(0, 1))
def test_predicted_error_is_the_measured_one(name: str, matrix: torch.Tensor, fraction: float) -> None:
    factor = ALL[name](matrix)
    rank = int(fraction * factor.factorised_rank)
    measured = trailing_error(matrix, factor, rank)
    floor = GRAM_FLOOR if name in FROM_GRAM else 1e-12
    slack = floor * matrix.shape[1] * float(matrix.norm())
    assert abs(measured - float(factor.trailing_errors[rank])) <= 1e-6 * measured + slack


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rank", [1, 7, 30])
def test_exact_rank_is_found(name: str, rank: int) -> None:
    matrix = low_rank(rank)
    factor = ALL[name](matrix)
    measured = trailing_error(matrix, factor, rank)
    size = float(matrix.norm())
    assert measured <= EXACT_RANK * size
    assert float(factor.trailing_errors[rank]) <= (EXACT_RANK if name in FROM_DATA else GRAM_FLOOR * 30) * size


@pytest.mark.parametrize("name", ["cholesky", "blocked cholesky", "reference cholesky", "lapack", "reference"])
def test_pivots_are_those_of_geqp3(name: str) -> None:
    generator = seeded(0)
    matrix = torch.randn(50, 20, dtype=torch.float64, generator=generator)
    r, pivots = scipy.linalg.qr(matrix.cpu().numpy(), mode="r", pivoting=True)
    factor = ALL[name](matrix)
    assert factor.pivots.tolist() == pivots.tolist()
    np.testing.assert_allclose(factor.r.abs().cpu().numpy(), np.abs(r[:20]), atol=1e-11)
    tails = [np.linalg.norm(r[k:20]) for k in range(21)]
    np.testing.assert_allclose(factor.trailing_errors.cpu().numpy(), tails, atol=1e-11)


@given(gram=grams(), block_size=st.integers(1, 9))
def test_cholesky_versions_agree_with_the_reference(gram: torch.Tensor, block_size: int) -> None:
    """Ties may be broken otherwise by rounding, so the error curves are compared, not the pivots."""
    want = reference.pivoted_cholesky(gram, gram.shape[0]).trailing_errors
    for got in (pivoted_cholesky(gram), blocked(gram, block_size=block_size)):
        first = min(2, gram.shape[0])  # after that equal columns may have been taken in another order
        assert float((got.trailing_errors - want)[:first].abs().max()) <= GRAM_FLOOR * (1 + float(want[0]))
        assert abs(float(got.trailing_errors[1] - want[1])) <= GRAM_FLOOR * (1 + float(want[0]))


@pytest.mark.parametrize("shape", [(400, 150), (150, 150), (90, 200)])
def test_randomized_pivots_are_nearly_as_good(shape: tuple[int, int]) -> None:
    generator = seeded(5)
    matrix = torch.randn(*shape, dtype=torch.float64, generator=generator)
    matrix = (
        matrix * torch.logspace(0, -4, shape[1], dtype=torch.float64)[torch.randperm(shape[1], generator=generator)]
    )
    best = pivoted_qr(matrix, method="lapack")
    got = pivoted_qr(matrix)
    for rank in (20, 60):
        assert float(got.trailing_errors[rank]) <= 1.25 * float(best.trailing_errors[rank])
    again = pivoted_qr(matrix)
    assert torch.equal(got.pivots, again.pivots)
    assert torch.equal(got.r, again.r)
    if shape[0] == 400:  # elsewhere the sketch would have as many rows as the matrix, and the matrix is used
        other = pivoted_qr(matrix, seed=1)
        assert not torch.equal(got.pivots, other.pivots)


def graded_spectrum(smallest: int, rows: int = 80, columns: int = 40) -> torch.Tensor:
    """Singular values 1 … 10^smallest in general position: no scaling of columns can help."""
    generator = seeded(2)
    left = torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64, generator=generator))[0]
    return left * torch.logspace(0, smallest, columns, dtype=torch.float64) @ right


def test_randomized_resolves_what_a_gram_cannot() -> None:
    """Below √eps the Gram sees only rounding, the matrix does not."""
    matrix = graded_spectrum(-12)
    best = float(pivoted_qr(matrix, method="lapack").trailing_errors[35])
    assert float(pivoted_qr(matrix, method="randomized").trailing_errors[35]) <= 3 * best
    assert float(pivoted_cholesky(gram(matrix)).trailing_errors[35]) > 30 * best


def test_graded_columns_do_not_trouble_a_gram() -> None:
    """Cholesky commutes with the scaling of columns: only the cut-off at √eps is left of the squared condition."""
    scales = torch.logspace(0, -7, 40, dtype=torch.float64)
    matrix = torch.linalg.qr(graded_spectrum(0))[0] * scales
    best = pivoted_qr(matrix, method="lapack").trailing_errors
    torch.testing.assert_close(pivoted_cholesky(gram(matrix)).trailing_errors[:40], best[:40], rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_against_scipy_interpolative(name: str) -> None:
    matrix = low_rank(6) + 1e-5 * low_rank(30)
    indices, projection = scipy.linalg.interpolative.interp_decomp(matrix.cpu().numpy(), 6, rand=False)
    skeleton = matrix.cpu().numpy()[:, indices[:6]]
    theirs = np.linalg.norm(matrix.cpu().numpy()[:, indices[6:]] - skeleton @ projection)
    factor = ALL[name](matrix)
    assert trailing_error(matrix, factor, 6) <= 3 * theirs


@pytest.mark.parametrize("name", ALL)
def test_one_column_zero_matrix_and_one_row(name: str) -> None:
    column = ALL[name](torch.ones(4, 1, dtype=torch.float64))
    assert column.pivots.tolist() == [0]
    torch.testing.assert_close(column.trailing_errors, torch.tensor([2.0, 0.0], dtype=torch.float64))
    zero = ALL[name](torch.zeros(6, 3, dtype=torch.float64))
    assert sorted(zero.pivots.tolist()) == [0, 1, 2]
    assert float(zero.trailing_errors.abs().max()) == 0
    row = ALL[name](torch.tensor([[1.0, -3.0, 2.0]], dtype=torch.float64))
    assert int(row.pivots[0]) == 1
    assert float(row.trailing_errors[1]) <= GRAM_FLOOR * 4


@pytest.mark.parametrize("factorise", [pivoted_cholesky, blocked])
def test_partial_rank(factorise: Callable[..., PivotedFactor]) -> None:
    matrix = low_rank(30)
    whole, part = factorise(gram(matrix)), factorise(gram(matrix), rank=11)
    assert part.r.shape == (11, 30)
    assert torch.equal(part.pivots[:11], whole.pivots[:11])
    torch.testing.assert_close(part.trailing_errors[:12], whole.trailing_errors[:12])
    assert part.pivots[11:].tolist() == sorted(part.pivots[11:].tolist())
    assert bool((part.trailing_errors[12:] >= whole.trailing_errors[12:] - 1e-12).all())
    assert factorise(gram(matrix), rank=0).r.shape == (0, 30)


@pytest.mark.parametrize("name", [name for name in ALL if name != "randomized, blocks of 4"])  # no entry of its own
@pytest.mark.parametrize("rows", [0, 3])
def test_a_matrix_without_columns(name: str, rows: int) -> None:
    """The hypothesis tests reach this on a GPU, where a chosen set may be empty."""
    factor = ALL[name](torch.zeros(rows, 0, dtype=torch.float64))
    assert factor.r.shape == (0, 0)
    assert factor.pivots.tolist() == []
    assert factor.trailing_errors.tolist() == [0.0]


@pytest.mark.parametrize("method", ["lapack", "randomized"])
def test_partial_rank_of_a_matrix(method: str) -> None:
    matrix = low_rank(30)
    part = pivoted_qr(matrix, method=method, rank=11)  # type: ignore[arg-type]
    assert part.r.shape == (11, 30)
    assert abs(trailing_error(matrix, part, 11) - float(part.trailing_errors[11])) <= 1e-10 * float(matrix.norm())


def test_gram_that_is_slightly_indefinite() -> None:
    """Rounding makes Grams indefinite: no NaN, and no pivot below the tolerance."""
    matrix = low_rank(5)
    noisy = gram(matrix) - 1e-14 * float(matrix.norm()) ** 2 * torch.eye(30, dtype=torch.float64)
    for factor in (pivoted_cholesky(noisy), blocked(noisy, block_size=3)):
        assert bool(torch.isfinite(factor.r).all())
        assert bool(torch.isfinite(factor.trailing_errors).all())
        assert factor.factorised_rank == 5


def test_strided_gram() -> None:
    matrix = low_rank(30)
    inner = torch.zeros(60, 60, dtype=torch.float64)
    inner[::2, ::2] = gram(matrix)
    assert torch.equal(pivoted_cholesky(inner[::2, ::2]).pivots, pivoted_cholesky(gram(matrix)).pivots)


@given(matrix=tall_or_wide(), count=st.integers(0, 9))
def test_pivots_of_a_sketch_on_a_device_and_by_lapack(matrix: torch.Tensor, count: int) -> None:
    """The loop for devices gives an R of its own pivots, as large as LAPACK's."""
    tolerance = 1e-9 * float(matrix.norm())
    chosen, r = greedy_pivots(matrix, count, tolerance)
    theirs, their_r = pivots_of_sketch(matrix, count, tolerance)
    assert chosen.shape == theirs.shape
    panel = matrix[:, chosen]
    assert float((r.mT @ r - panel.mT @ panel).norm()) <= 1e-12 * float(matrix.norm()) ** 2
    torch.testing.assert_close(r.diagonal()[:1].abs(), their_r.diagonal()[:1].abs())


def test_preconditioned_cholesky_qr_survives_a_useless_sketch() -> None:
    """A sketch that missed a direction makes the preconditioned Gram nearly singular: Householder QR takes over."""
    panel = low_rank(10, rows=50, columns=10)
    misleading = torch.linalg.qr(panel, mode="r")[1]
    misleading[-1, -1] *= 1e9
    r, orthonormal = preconditioned_cholesky_qr(panel, misleading)
    torch.testing.assert_close(orthonormal @ r, panel)
    torch.testing.assert_close(orthonormal.mT @ orthonormal, torch.eye(10, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pivoted_cholesky(torch.zeros(2, 3)), "square"),
        (lambda: pivoted_cholesky(torch.zeros(2, 3, 3)), "square"),
        (lambda: pivoted_cholesky(torch.full((2, 2), torch.nan)), "not finite"),
        (lambda: pivoted_cholesky(torch.eye(2), rank=3), "outside"),
        (lambda: pivoted_cholesky(torch.eye(2, dtype=torch.bfloat16)), "fp32 or fp64"),
        (lambda: pivoted_qr(torch.full((2, 2), torch.inf)), "not finite"),
        (lambda: pivoted_qr(torch.zeros(3, 2), rank=3), "outside"),
        (lambda: pivoted_qr(torch.ones(3, 2), method="qr"), "unknown method"),  # type: ignore[arg-type]
        (lambda: pivoted_qr(torch.zeros(3)), "expected a matrix"),
    ],
)
def test_refuses_what_does_not_fit(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@given(matrix=tall_or_wide())
def test_pivots_alone_are_those_of_the_factor(matrix: torch.Tensor) -> None:
    count = matrix.shape[1]
    factor = pivoted_cholesky(gram(matrix))
    pivots = cholesky_pivots_(gram(matrix), rank=count)
    assert sorted(pivots.tolist()) == list(range(count))
    assert torch.equal(pivots[: factor.factorised_rank], factor.pivots[: factor.factorised_rank])


def test_pivots_alone_are_those_of_geqp3() -> None:
    matrix = low_rank(30) * torch.logspace(0, -3, 30, dtype=torch.float64)
    _, expected = scipy.linalg.qr(matrix.cpu().numpy(), mode="r", pivoting=True)
    assert cholesky_pivots_(gram(matrix), rank=20).tolist() == expected[:20].tolist()
    assert cholesky_pivots_(gram(matrix).float(), rank=5).tolist() == expected[:5].tolist()
