"""Grams of bf16 and fp16 rows in Triton. Compiled and run in the interpreter only, never on a GPU: see README.md.

A product of two such numbers is exact in fp32, so tensor cores multiply the rows as they are and sum in fp32. Program
(i, j) owns one tile of the result and walks over all rows: one order of sums, no atomics. Of a symmetric Gram only the
tiles on and above the diagonal are launched. Every other pair of dtypes is a GEMM of cuBLAS: `torch_impl`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oneshot_kernels.backend import triton_interpreted
from oneshot_kernels.gram import torch_impl

# What fits in registers without spilling, on sm_80, sm_89, sm_90 and gfx942: tests/kernels/test_ahead_of_time.py
TILE = 128
ROWS_PER_STEP = 64
NUM_WARPS = 8
NUM_STAGES = 3
ALIGNMENT = 16  # Triton knows of an argument that 16 divides it, or nothing


@triton.jit(do_not_specialize=["num_rows"])  # a last, shorter batch needs no compilation of its own
def gram_kernel(  # type: ignore[no-untyped-def]
    out, left, right, num_rows, num_left, num_right, padded_left, padded_right,
    stride_out_row, stride_out_column, stride_left, stride_right,
    symmetric: tl.constexpr, widen: tl.constexpr, tile: tl.constexpr, step_rows: tl.constexpr,
):  # fmt: skip
    # out[I, J] += sum over rows r of left[r, I]ᵀ right[r, J];  symmetric: left is right, I <= J
    program = tl.program_id(0)
    if symmetric:
        # Tile (i, j), i <= j, is program j (j + 1)/2 + i. The root may be one off: both steps mend that.
        tile_column = ((tl.sqrt(8.0 * program.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        tile_column = tl.where(tile_column * (tile_column + 1) // 2 > program, tile_column - 1, tile_column)
        tile_column = tl.where((tile_column + 1) * (tile_column + 2) // 2 <= program, tile_column + 1, tile_column)
        tile_row = program - tile_column * (tile_column + 1) // 2
    else:
        tiles = tl.cdiv(num_right, tile)
        tile_row = program // tiles
        tile_column = program % tiles
    row = tile_row * tile + tl.arange(0, tile)
    column = tile_column * tile + tl.arange(0, tile)
    step = tl.arange(0, step_rows)
    x_at = left + step[:, None].to(tl.int64) * stride_left + row[None, :]
    y_at = right + step[:, None].to(tl.int64) * stride_right + column[None, :]
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(0, num_rows, step_rows):
        alive = start + step < num_rows
        x = tl.load(x_at, mask=alive[:, None] & (row[None, :] < padded_left), other=0.0)
        y = tl.load(y_at, mask=alive[:, None] & (column[None, :] < padded_right), other=0.0)
        if widen:  # the interpreter multiplies the bits of bf16 as if they were whole numbers
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        total = tl.dot(tl.trans(x), y, total)
        x_at += tl.cast(stride_left, tl.int64) * step_rows
        y_at += tl.cast(stride_right, tl.int64) * step_rows
    # The tile is added to memory in two halves: where n is odd, all its addresses at once would not fit in registers.
    first, second = tl.split(tl.permute(tl.reshape(total, (tile, 2, tile // 2)), (0, 2, 1)))
    half = tile_column * tile + tl.arange(0, tile // 2)
    _add_to(out, first, row, half, num_left, num_right, stride_out_row, stride_out_column)
    _add_to(out, second, row, half + tile // 2, num_left, num_right, stride_out_row, stride_out_column)


@triton.jit
def _add_to(out, part, row, column, num_rows, num_columns, stride_row, stride_column):  # type: ignore[no-untyped-def]
    inside = (row[:, None] < num_rows) & (column[None, :] < num_columns)
    target = out + row[:, None].to(tl.int64) * stride_row + column[None, :].to(tl.int64) * stride_column
    tl.store(target, tl.load(target, mask=inside, other=0.0) + part, mask=inside)


def gram_(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rowsᵀ rows to the tiles of `out` on and above the diagonal."""
    if _has_kernel(out, rows, rows):
        tiles = triton.cdiv(rows.shape[1], TILE)
        _launch(out, rows, rows, tiles * (tiles + 1) // 2, symmetric=True)
    else:
        torch_impl.gram_(out, rows)


def mirror_(out: torch.Tensor) -> None:
    """Copy everything above the diagonal below it."""
    for start in range(0, out.shape[0], TILE):
        stop = start + TILE
        out[stop:, start:stop] = out[start:stop, stop:].mT
        block = out[start:stop, start:stop]
        block.copy_(block.triu() + block.triu(1).mT)


def cross_gram_(out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> None:
    """Add rowsᵀ targets to `out`."""
    if _has_kernel(out, rows, targets):
        tiles = triton.cdiv(rows.shape[1], TILE) * triton.cdiv(targets.shape[1], TILE)
        _launch(out, rows, targets, tiles, symmetric=False)
    else:
        torch_impl.cross_gram_(out, rows, targets)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows`, or a copy with zero columns up to a multiple of 16, where threads could not load 16 bytes at once.

    Loads of single numbers would need more registers than there are.
    """
    fits = rows.stride(1) == 1 and rows.stride(0) % ALIGNMENT == 0 and rows.shape[1] % ALIGNMENT == 0
    if fits and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    num_rows, num_columns = rows.shape
    padded = rows.new_zeros(num_rows, triton.cdiv(num_columns, ALIGNMENT) * ALIGNMENT)
    padded[:, :num_columns] = rows
    return padded


def _has_kernel(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    return out.dtype == torch.float32 and left.dtype == right.dtype and left.dtype in torch_impl.HALF


def _launch(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, programs: int, *, symmetric: bool) -> None:
    x = _aligned(left)
    y = x if symmetric else _aligned(right)
    gram_kernel[(programs,)](
        out, x, y, x.shape[0], left.shape[1], right.shape[1], x.shape[1], y.shape[1],
        *out.stride(), x.stride(0), y.stride(0),
        symmetric=symmetric, widen=triton_interpreted(), tile=TILE, step_rows=ROWS_PER_STEP,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
