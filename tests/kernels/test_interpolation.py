"""Interpolation matrices and errors, from a factor and from data, against SVD-based least squares."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from oneshot_kernels import (
    interpolation_from_data,
    interpolation_matrix,
    pivoted_cholesky,
    pivoted_qr,
    trailing_error_from_data,
)
from oneshot_kernels.pivoted_qr import reference


@pytest.fixture
def matrix(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(50, 12, dtype=torch.float64, generator=generator)


def test_both_ways_agree_with_least_squares(matrix: torch.Tensor) -> None:
    gram = matrix.mT @ matrix
    factor = pivoted_cholesky(gram)
    skeleton = factor.pivots[:5]
    want = torch.as_tensor(reference.interpolation_matrix(matrix.cpu().numpy(), skeleton.cpu().numpy()))
    residual = float(
        np.linalg.norm(matrix.cpu().numpy() - matrix.cpu().numpy()[:, skeleton.cpu().numpy()] @ want.cpu().numpy())
    )
    for got in (
        interpolation_matrix(factor, 5),
        interpolation_from_data(matrix, skeleton),
    ):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
        assert torch.equal(got[:, skeleton], torch.eye(5, dtype=torch.float64))
        assert abs(trailing_error_from_data(matrix, got, skeleton) - residual) <= 1e-12 * residual + 1e-13
    assert abs(float(factor.trailing_errors[5]) - residual) <= 1e-9


def test_rank_zero_and_full_rank(matrix: torch.Tensor) -> None:
    factor = pivoted_qr(matrix, method="lapack")
    assert interpolation_matrix(factor, 0).shape == (0, 12)
    assert torch.equal(interpolation_matrix(factor, 12)[:, factor.pivots], torch.eye(12, dtype=torch.float64))
    assert abs(float(factor.trailing_errors[0]) - float(matrix.norm())) <= 1e-12
    assert float(factor.trailing_errors[12]) == 0


def test_skeleton_beyond_the_numerical_rank() -> None:
    matrix = torch.tensor([[1.0, 1.0, 0.0, 2.0]], dtype=torch.float64)
    factor = pivoted_cholesky(matrix.mT @ matrix)
    interpolation = interpolation_matrix(factor, 3)
    assert torch.equal(interpolation[:, factor.pivots[:3]], torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(matrix[:, factor.pivots[:3]] @ interpolation, matrix)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: interpolation_matrix(pivoted_cholesky(a.mT @ a), 13), "outside"),
        (lambda a: interpolation_from_data(torch.ones(4, 3), torch.tensor([0, 1])), "linearly dependent"),
        (lambda a: interpolation_from_data(a[:3], torch.arange(5)), "linearly dependent"),
    ],
)
def test_refuses_what_cannot_be(matrix: torch.Tensor, call: Callable[[torch.Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(matrix)
