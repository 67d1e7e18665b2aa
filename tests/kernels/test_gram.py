"""Grams and cross-Grams against the fp64 reference."""

import pytest
import torch
from oneshot_kernels import cross_gram_, gram_, scale_columns
from oneshot_kernels.gram import reference, torch_impl
from tolerances import assert_close

SHAPES = [(5, 7, 3), (1, 1, 1), (33, 70, 65), (70, 1, 2)]  # (m, n, p)


@pytest.mark.parametrize(("num_rows", "num_columns", "num_targets"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_the_reference(
    fast_backend: str,
    generator: torch.Generator,
    num_rows: int,
    num_columns: int,
    num_targets: int,
    dtype: torch.dtype,
    weighted: bool,
) -> None:
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.randn(num_rows, num_columns, generator=generator).to(dtype)
    targets = torch.randn(num_rows, num_targets, generator=generator).to(dtype)
    weights = torch.randn(num_rows, generator=generator).to(accumulated) if weighted else None
    start = torch.randn(num_columns, num_columns, generator=generator).to(accumulated)
    start = start + start.mT
    got = gram_(start.clone(), rows, row_weights=weights)
    want = start.double()
    reference.gram_(want, rows, weights)
    absolute = rows.double().abs()
    heaviest = 1.0 if weights is None else float(weights.abs().max())
    scale = heaviest * float((absolute.mT @ absolute).norm()) + float(start.norm())
    assert_close(got, want, scale, accumulated)
    assert_close(got, got.mT, scale, accumulated)

    got = cross_gram_(torch.zeros(num_columns, num_targets, dtype=accumulated), rows, targets, row_weights=weights)
    want = torch.zeros(num_columns, num_targets, dtype=torch.float64)
    reference.cross_gram_(want, rows, targets, weights)
    assert_close(got, want, heaviest * float((absolute.mT @ targets.double().abs()).norm()), accumulated)


@pytest.mark.parametrize("width", [1, 4, 10, 16])
def test_panels_cover_everything(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator, width: int) -> None:
    monkeypatch.setattr(torch_impl, "PANEL_WIDTH", width)
    monkeypatch.setattr(torch_impl, "MINIMUM_COLUMNS", 1)
    rows = torch.randn(9, 10, dtype=torch.float64, generator=generator)
    weights = torch.rand(9, dtype=torch.float64, generator=generator)
    out = gram_(torch.eye(10, dtype=torch.float64), rows, row_weights=weights)
    gram_(out, rows[:4])
    want = torch.eye(10) + rows.mT @ (weights[:, None] * rows) + rows[:4].mT @ rows[:4]
    assert_close(out, want, 3 * float(rows.norm()) ** 2, torch.float64)


def test_wide_enough_for_panels(generator: torch.Generator) -> None:
    rows = torch.randn(16, torch_impl.MINIMUM_COLUMNS + 3, generator=generator)
    out = gram_(torch.zeros(rows.shape[1], rows.shape[1]), rows)
    assert_close(out, rows.double().mT @ rows.double(), float(rows.norm()) ** 2, torch.float32)


def test_strided_inputs(fast_backend: str, generator: torch.Generator) -> None:
    rows = torch.randn(9, 26, generator=generator).mT[::2]
    weights = torch.rand(26, generator=generator)[::2]
    out = gram_(torch.zeros(9, 9).mT, rows, row_weights=weights)
    want = torch.zeros(9, 9, dtype=torch.float64)
    reference.gram_(want, rows, weights)
    assert_close(out, want, float(rows.norm()) ** 2, torch.float32)


def test_no_rows_changes_nothing(fast_backend: str) -> None:
    assert torch.equal(gram_(torch.eye(3), torch.zeros(0, 3)), torch.eye(3))
    assert torch.equal(cross_gram_(torch.ones(3, 2), torch.zeros(0, 3), torch.zeros(0, 2)), torch.ones(3, 2))


def test_fp32_rows_into_an_fp64_gram_are_multiplied_in_fp64(fast_backend: str) -> None:
    rows = torch.tensor([[1.0, 2.0**-20]])
    out = gram_(torch.zeros(2, 2, dtype=torch.float64), torch.cat([rows, 2.0**-20 * rows]))
    assert float(out[0, 0]) == 1 + 2.0**-40


def test_scaled_columns(generator: torch.Generator) -> None:
    matrix = torch.randn(20, 6, dtype=torch.float64, generator=generator)
    weights = torch.rand(6, generator=generator)
    scaled = matrix * weights.double()
    assert_close(
        scale_columns(matrix.mT @ matrix, weights), scaled.mT @ scaled, float(matrix.norm()) ** 2, torch.float64
    )


@pytest.mark.parametrize(
    ("out", "rows", "weights"),
    [
        (torch.zeros(3, 4), torch.zeros(2, 3), None),
        (torch.zeros(3, 3, dtype=torch.bfloat16), torch.zeros(2, 3), None),
        (torch.zeros(3, 3), torch.zeros(2, 3, dtype=torch.int32), None),
        (torch.zeros(3, 3), torch.zeros(2, 3), torch.zeros(3)),
    ],
)
def test_refuses_what_does_not_fit(out: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"expected|fp32|floating"):
        gram_(out, rows, row_weights=weights)
