"""The sketch in Triton; README.md has its times on a GPU.

Torch computes every row's place and sign and sorts the places; one kernel sums each sketch row over its data rows in
order. No atomics: each output tile belongs to one program, so the order of the sums depends on the rows alone. Sketch
rows without a data row are not touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oneshot_kernels.count_sketch.torch_impl import group_by_position, positions_and_signs

COLUMNS_PER_PROGRAM = 128
ROWS_PER_STEP = 16


@triton.jit
def segment_sum_kernel(  # type: ignore[no-untyped-def]
    out, rows, sources, starts, values, num_columns, stride_out, stride_row, stride_column,
    block_columns: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    # out[p, :] += sum over e = starts[p] … starts[p + 1] - 1 of values[e] rows[sources[e], :]
    place = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + place)
    last = tl.load(starts + place + 1)
    if begin == last:
        return
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = column < num_columns
    total = tl.zeros((block_columns,), dtype=out.dtype.element_ty)
    for first in range(begin, last, chunk):
        entry = first + tl.arange(0, chunk)
        source = tl.load(sources + entry, mask=entry < last, other=0)
        value = tl.load(values + entry, mask=entry < last, other=0.0)
        address = rows + source[:, None] * stride_row + column[None, :].to(tl.int64) * stride_column
        data = tl.load(address, mask=(entry < last)[:, None] & inside[None, :], other=0.0)
        total += tl.sum(value[:, None] * data.to(out.dtype.element_ty), axis=0)
    target = out + place * stride_out + column
    tl.store(target, tl.load(target, mask=inside) + total, mask=inside)


def sketch_(out: torch.Tensor, rows: torch.Tensor, row_offset: int, seed: int, nonzeros: int) -> None:
    """Add S rows to `out`; see `oneshot_kernels.count_sketch.sketch_`."""
    num_rows, (sketch_size, num_columns) = rows.shape[0], out.shape
    positions, signs = positions_and_signs(sketch_size, num_rows, row_offset, seed, nonzeros, rows.device)
    order, starts = group_by_position(positions.flatten(), sketch_size)
    values = signs.flatten()[order].to(out.dtype) * nonzeros**-0.5
    target = out if out.stride(1) == 1 else out.contiguous()
    grid = (sketch_size, triton.cdiv(num_columns, COLUMNS_PER_PROGRAM))
    segment_sum_kernel[grid](
        target, rows, order % num_rows, starts, values, num_columns,
        target.stride(0), rows.stride(0), rows.stride(1), block_columns=COLUMNS_PER_PROGRAM,
        chunk=ROWS_PER_STEP,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)
