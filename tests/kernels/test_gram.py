"""Grams and cross-Grams against the fp64 reference."""

import pytest
import torch
from oneshot_kernels import cross_gram_, gram_, mirror_
from oneshot_kernels.gram import reference, torch_impl
from tolerances import assert_close

SHAPES = [(5, 7, 3), (1, 1, 1), (33, 70, 65), (70, 1, 2), (70, 300, 140)]  # (m, n, p)


@pytest.mark.parametrize(("num_rows", "num_columns", "num_targets"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("accumulated", [torch.float32, torch.float64])
def test_agrees_with_the_reference(
    generator: torch.Generator,
    num_rows: int,
    num_columns: int,
    num_targets: int,
    dtype: torch.dtype,
    accumulated: torch.dtype,
) -> None:
    """Rows of fp64 that are summed in fp32 lose digits before they are multiplied: that is the caller's wish."""
    rows = torch.randn(num_rows, num_columns, generator=generator).to(dtype)
    targets = torch.randn(num_rows, num_targets, generator=generator).to(dtype)
    start = torch.randn(num_columns, num_columns, generator=generator).to(accumulated)
    start = start + start.mT
    got = gram_(start.clone(), rows)
    want = start.double()
    reference.gram_(want, rows)
    absolute = rows.double().abs()
    scale = float((absolute.mT @ absolute).norm()) + float(start.norm())
    assert_close(got, want, scale, accumulated)
    assert_close(got, got.mT, scale, accumulated)

    got = cross_gram_(torch.zeros(num_columns, num_targets, dtype=accumulated), rows, targets)
    want = torch.zeros(num_columns, num_targets, dtype=torch.float64)
    reference.cross_gram_(want, rows, targets)
    assert_close(got, want, float((absolute.mT @ targets.double().abs()).norm()), accumulated)


@pytest.mark.parametrize("width", [1, 4, 10, 16])
def test_panels_cover_everything(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator, width: int) -> None:
    for name in ("PANEL_WIDTH", "DEVICE_PANEL_WIDTH"):
        monkeypatch.setattr(torch_impl, name, width)
    monkeypatch.setattr(torch_impl, "MINIMUM_COLUMNS", 1)
    rows = torch.randn(9, 10, dtype=torch.float64, generator=generator)
    out = gram_(torch.eye(10, dtype=torch.float64), rows)
    gram_(out, rows[:4])
    want = torch.eye(10) + rows.mT @ rows + rows[:4].mT @ rows[:4]
    assert_close(out, want, 3 * float(rows.norm()) ** 2, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_columns", [5, 300, torch_impl.MINIMUM_COLUMNS + 3])
def test_mirrored_once_or_at_every_batch_gives_the_same_bits(
    generator: torch.Generator, num_columns: int, dtype: torch.dtype
) -> None:
    rows = torch.randn(12, num_columns, generator=generator).to(dtype)
    every, once = torch.zeros(2, num_columns, num_columns)
    for batch in rows.split(5):
        gram_(every, batch)
        assert gram_(once, batch, mirror=False) is once
    assert mirror_(once) is once
    assert torch.equal(once, every)
    assert torch.equal(mirror_(once), every)


def test_wide_enough_for_panels(generator: torch.Generator) -> None:
    rows = torch.randn(16, torch_impl.MINIMUM_COLUMNS + 3, generator=generator)
    out = gram_(torch.zeros(rows.shape[1], rows.shape[1]), rows)
    assert_close(out, rows.double().mT @ rows.double(), float(rows.norm()) ** 2, torch.float32)
    assert torch.equal(out, out.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_inputs(generator: torch.Generator, dtype: torch.dtype) -> None:
    rows = torch.randn(9, 26, generator=generator).to(dtype).mT[::2]
    out = gram_(torch.zeros(9, 9).mT, rows)
    want = torch.zeros(9, 9, dtype=torch.float64)
    reference.gram_(want, rows)
    assert_close(out, want, float(rows.norm()) ** 2, torch.float32)


def test_no_rows_changes_nothing() -> None:
    assert torch.equal(gram_(torch.eye(3), torch.zeros(0, 3)), torch.eye(3))
    assert torch.equal(cross_gram_(torch.ones(3, 2), torch.zeros(0, 3), torch.zeros(0, 2)), torch.ones(3, 2))
    assert mirror_(torch.zeros(0, 0)).shape == (0, 0)


def test_fp32_rows_into_an_fp64_gram_are_multiplied_in_fp64() -> None:
    rows = torch.tensor([[1.0, 2.0**-20]])
    out = gram_(torch.zeros(2, 2, dtype=torch.float64), torch.cat([rows, 2.0**-20 * rows]))
    assert float(out[0, 0]) == 1 + 2.0**-40


def test_products_of_halves_are_exact_in_fp32() -> None:
    """(1 + 2⁻⁷)² has 15 digits, which neither bf16 nor fp16 holds."""
    for dtype in (torch.bfloat16, torch.float16):
        rows = torch.tensor([[1 + 2.0**-7]]).to(dtype)
        assert float(gram_(torch.zeros(1, 1), rows)) == (1 + 2.0**-7) ** 2


@pytest.mark.parametrize(
    ("out", "rows"),
    [
        ((3, 4, torch.float32), (2, 3, torch.float32)),
        ((3, 3, torch.bfloat16), (2, 3, torch.float32)),
        ((3, 3, torch.float32), (2, 3, torch.int32)),
    ],
)
def test_refuses_what_does_not_fit(out: tuple[int, int, torch.dtype], rows: tuple[int, int, torch.dtype]) -> None:
    with pytest.raises(ValueError, match=r"expected|fp32|floating"):
        gram_(torch.zeros(*out[:2], dtype=out[2]), torch.zeros(*rows[:2], dtype=rows[2]))


def test_where_triton_is_forced_the_bits_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    rows = torch.randn(9, 20, generator=generator).bfloat16()
    want = gram_(torch.zeros(20, 20), rows)
    monkeypatch.setenv("ONESHOT_KERNELS", "triton")
    monkeypatch.setattr("oneshot_kernels.backend.triton_installed", lambda: True)
    assert torch.equal(gram_(torch.zeros(20, 20), rows), want)


def test_only_a_square_is_mirrored() -> None:
    with pytest.raises(ValueError, match="square"):
        mirror_(torch.zeros(2, 3))
