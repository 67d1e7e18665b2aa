"""The pivots of a panel in Triton, one kernel a pivot; `torch_panel` is its reference.

The columns are cut into tiles, one program each. A kernel begins where the one before has left the largest remaining
entry of every tile, so each program finds the next pivot on its own. It then makes its part of the pivot's row of R,
and leaves the largest of what remains in its tile. Nothing is summed or chosen in the order of chance.
"""

from __future__ import annotations

import typing

import torch
import triton
import triton.language as tl

if typing.TYPE_CHECKING:
    from oneshot_kernels.pivoted_qr.panels import Panel

TILE = 32  # columns of one program: many programs, because a pivot waits for its slowest one
STEPS = 16  # earlier pivots that are subtracted at once: so few registers that all programs run at the same time


def take_pivots_(panel: Panel) -> None:
    """Take `panel.width` pivots one after the other, of every Gram of the panel at once."""
    gram, width = panel.gram, panel.width
    count, num_columns, _ = gram.shape
    tiles = triton.cdiv(num_columns, TILE)
    # of every tile, twice: what the present kernel reads, and what it leaves to the next
    largest = gram.new_empty(count, 2, tiles)
    largest_place = torch.empty(count, 2, tiles, dtype=torch.int32, device=gram.device)
    largest_column = torch.empty_like(largest_place)
    grid, most_tiles = (tiles, count), triton.next_power_of_2(tiles)
    found = (largest, largest_place, largest_column)
    diagonal_kernel[grid](gram, panel.remainder, panel.place, *found, panel.start, num_columns, tiles, tile=TILE)
    for step in range(width):
        pivot_kernel[grid](
            gram,
            panel.rows,
            panel.remainder,
            panel.place,
            *found,
            panel.sizes,
            panel.tolerance,
            panel.start,
            panel.limit,
            num_columns,
            tiles,
            step,
            width,
            tile=TILE,
            most_tiles=most_tiles,
            steps=STEPS,
        )


@triton.jit
def leave_largest(left, place, column, largest, largest_place, largest_column, at):  # type: ignore[no-untyped-def]
    # of several that are equal, the first in the present order
    top = tl.max(left, 0)
    first = tl.min(tl.where(left == top, place, 2147483647), 0)
    tl.store(largest + at, top)
    tl.store(largest_place + at, first)
    tl.store(largest_column + at, tl.min(tl.where(place == first, column, 2147483647), 0))


@triton.jit(do_not_specialize=["num_columns", "tiles"])
def diagonal_kernel(  # type: ignore[no-untyped-def]
    gram, remainder, place, largest, largest_place, largest_column, start, num_columns, tiles, tile: tl.constexpr
):
    # remainder = diag(gram), and the largest entry of the tile among the columns that are left
    problem = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = column < num_columns
    at = problem * num_columns + column
    diagonal = tl.load(gram + at * num_columns + column, mask=inside, other=float("-inf"))
    tl.store(remainder + at, diagonal, mask=inside)
    own_place = tl.load(place + at, mask=inside, other=-1)
    left = tl.where(own_place >= tl.load(start), diagonal, float("-inf"))
    to = problem * 2 * tiles + tl.program_id(0)
    leave_largest(left, own_place.to(tl.int32), column, largest, largest_place, largest_column, to)


@triton.jit(do_not_specialize=["limit", "num_columns", "tiles", "step", "width"])
def pivot_kernel(  # type: ignore[no-untyped-def]
    gram,
    rows,
    remainder,
    place,
    largest,
    largest_place,
    largest_column,
    sizes,
    tolerance,
    start,
    limit,
    num_columns,
    tiles,
    step,
    width,
    tile: tl.constexpr,
    most_tiles: tl.constexpr,
    steps: tl.constexpr,
):
    problem = tl.program_id(1).to(tl.int64)
    turn = tl.load(start) + step
    # the pivot p: the largest of the tiles' largest entries
    entry = tl.arange(0, most_tiles)
    known = entry < tiles
    read = problem * 2 * tiles + (step % 2) * tiles + entry
    tops = tl.load(largest + read, mask=known, other=float("-inf"))
    size = tl.max(tops, 0)
    places = tl.load(largest_place + read, mask=known, other=2147483647)
    places = tl.where(tops == size, places, 2147483647)
    pivot_place = tl.min(places, 0)
    columns = tl.load(largest_column + read, mask=known, other=2147483647)
    pivot = tl.min(tl.where(places == pivot_place, columns, 2147483647), 0).to(tl.int64)
    enough = (size > tl.load(tolerance + problem)) & (turn < limit)
    pivot = tl.where(enough, pivot, 0)
    # r = (G[p, :] - rows[p] · rows) / √size in the columns that are left, from the lower triangle of G
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = column < num_columns
    at = problem * num_columns + column
    own_place = tl.load(place + at, mask=inside, other=-1)
    own_rows = rows + (problem * num_columns + tl.program_id(0) * tile) * width
    own = tl.arange(0, tile) * width
    products = tl.zeros((tile, steps), dtype=size.dtype)
    for begin in range(0, step, steps):
        number = begin + tl.arange(0, steps)
        earlier = number < step
        coefficients = tl.load(rows + (problem * num_columns + pivot) * width + number, mask=earlier, other=0.0)
        before = tl.load(own_rows + own[:, None] + number[None, :], mask=inside[:, None] & earlier[None, :], other=0.0)
        products += before * coefficients[None, :]
    row = tl.load(
        gram + (problem * num_columns + pivot) * num_columns + column, mask=inside & (column <= pivot), other=0.0
    ) + tl.load(gram + at * num_columns + pivot, mask=inside & (column > pivot), other=0.0)
    root = tl.sqrt(tl.where(enough, size, 1.0).to(tl.float64)).to(size.dtype)
    scale = tl.where(enough, 1 / root, 0.0)
    row = tl.where(own_place >= turn, (row - tl.sum(products, 1)) * scale, 0.0)
    tl.store(own_rows + own + step, row, mask=inside)
    left = tl.load(remainder + at, mask=inside, other=0.0) - row * row
    tl.store(remainder + at, left, mask=inside)
    # the pivot changes places with the column whose turn it would be
    moved = tl.where(column == pivot, turn, tl.where(own_place == turn, pivot_place.to(tl.int64), own_place))
    own_place = tl.where(enough, moved, own_place)
    tl.store(place + at, own_place, mask=inside)
    left = tl.where(own_place > turn, left, float("-inf"))
    to = problem * 2 * tiles + (1 - step % 2) * tiles + tl.program_id(0)
    leave_largest(left, own_place.to(tl.int32), column, largest, largest_place, largest_column, to)
    first_program = tl.program_id(0) == 0
    tl.store(sizes + problem * width + step, tl.where(enough, size, float("inf")), mask=first_program)
