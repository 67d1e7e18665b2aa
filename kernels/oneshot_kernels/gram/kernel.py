"""Grams in Triton. Run in Triton's interpreter only (on a CPU), never on a GPU: see README.md.

Program (i, j) owns one tile of the result and walks over all rows, so sums have one order and there are no atomics. For
the symmetric Gram tiles below the diagonal return at once, and each other tile is stored twice, the second time
transposed: half the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 64
ROWS_PER_STEP = 32


@triton.jit
def _gram_kernel(  # type: ignore[no-untyped-def]
    out, left, right, weights, num_rows, num_left, num_right, stride_out_row, stride_out_column,
    stride_left_row, stride_left_column, stride_right_row, stride_right_column, stride_weight,
    weighted: tl.constexpr, symmetric: tl.constexpr, precision: tl.constexpr, tile: tl.constexpr,
    step_rows: tl.constexpr,
):  # fmt: skip
    # out[I, J] += sum over rows r of left[r, I]ᵀ w[r] right[r, J];  symmetric: left is right, I <= J
    tile_row = tl.program_id(0)
    tile_column = tl.program_id(1)
    if symmetric and tile_row > tile_column:
        return
    row = (tile_row * tile + tl.arange(0, tile)).to(tl.int64)
    column = (tile_column * tile + tl.arange(0, tile)).to(tl.int64)
    total = tl.zeros((tile, tile), dtype=out.dtype.element_ty)
    for start in range(0, num_rows, step_rows):
        step = (start + tl.arange(0, step_rows)).to(tl.int64)
        alive = step < num_rows
        x = tl.load(
            left + step[:, None] * stride_left_row + row[None, :] * stride_left_column,
            mask=alive[:, None] & (row[None, :] < num_left), other=0.0,
        ).to(out.dtype.element_ty)  # fmt: skip
        y = tl.load(
            right + step[:, None] * stride_right_row + column[None, :] * stride_right_column,
            mask=alive[:, None] & (column[None, :] < num_right), other=0.0,
        ).to(out.dtype.element_ty)  # fmt: skip
        if weighted:
            y = y * tl.load(weights + step * stride_weight, mask=alive, other=0.0).to(out.dtype.element_ty)[:, None]
        total += tl.dot(tl.trans(x), y, input_precision=precision, out_dtype=out.dtype.element_ty)
    inside = (row[:, None] < num_left) & (column[None, :] < num_right)
    target = out + row[:, None] * stride_out_row + column[None, :] * stride_out_column
    tl.store(target, tl.load(target, mask=inside, other=0.0) + total, mask=inside)
    if symmetric and tile_row < tile_column:
        mirrored = out + column[None, :] * stride_out_row + row[:, None] * stride_out_column
        tl.store(mirrored, tl.load(mirrored, mask=inside, other=0.0) + total, mask=inside)


def gram_(out: torch.Tensor, rows: torch.Tensor, row_weights: torch.Tensor | None) -> None:
    """out += rowsᵀ diag(w) rows, upper tiles only."""
    _launch(out, rows, rows, row_weights, symmetric=True)


def cross_gram_(out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, row_weights: torch.Tensor | None) -> None:
    """out += rowsᵀ diag(w) targets."""
    _launch(out, rows, targets, row_weights, symmetric=False)


def _launch(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, row_weights: torch.Tensor | None, *, symmetric: bool
) -> None:
    # TF32 holds bf16 exactly, so its products are exact and sums fp32; other inputs are multiplied as IEEE fp32.
    exact_in_tf32 = left.dtype == right.dtype == torch.bfloat16 and row_weights is None
    weights = left.new_empty(1) if row_weights is None else row_weights
    _gram_kernel[(triton.cdiv(left.shape[1], TILE), triton.cdiv(right.shape[1], TILE))](
        out, left, right, weights, left.shape[0], left.shape[1], right.shape[1], *out.stride(),
        *left.stride(), *right.stride(), weights.stride(0),
        weighted=row_weights is not None, symmetric=symmetric,
        precision="tf32" if exact_in_tf32 and out.dtype == torch.float32 else "ieee",
        tile=TILE, step_rows=ROWS_PER_STEP,
    )  # fmt: skip
