"""The pivots of a panel in torch's small kernels: the reference of `triton_panel`, and its fallback."""

from __future__ import annotations

import typing

import torch

if typing.TYPE_CHECKING:
    from oneshot_kernels.pivoted_qr.panels import Panel


def take_pivots_(panel: Panel) -> None:
    """Take `panel.width` pivots one after the other; every kernel has the same shapes for every panel.

    No Python number is written through an index: on CUDA that waits for the device.
    """
    column = torch.arange(panel.gram.shape[1], device=panel.gram.device)
    last = column.numel()
    infinite = panel.gram.new_full((1, 1), torch.inf)
    turns = panel.start + torch.arange(panel.width, device=panel.gram.device)
    tolerances = torch.where(turns < panel.limit, panel.tolerance, infinite)
    panel.remainder.copy_(panel.gram.diagonal(dim1=1, dim2=2))
    for step in range(panel.width):
        turn, size_of = turns[step : step + 1], panel.sizes[:, step : step + 1]
        is_left = panel.place >= turn
        left = torch.where(is_left, panel.remainder, -torch.inf)
        size = left.amax(1, keepdim=True)
        # of several that are equal, the first in the present order
        place, pivot = torch.where(left == size, panel.place, last).min(1, keepdim=True)
        enough = size > tolerances[:, step : step + 1]
        torch.where(enough, size, infinite, out=size_of)
        row = _row_of(panel.gram, pivot, column)
        if step > 0:
            known = panel.rows[:, :, :step]
            coefficients = known.gather(1, pivot.unsqueeze(2).expand(-1, 1, step))
            row.baddbmm_(known, coefficients.mT, alpha=-1)
        # 1/√∞ is 0: nothing is removed beyond the rank
        row = torch.where(is_left, row.squeeze(2) * size_of.rsqrt(), 0.0)
        panel.rows[:, :, step] = row
        panel.remainder.addcmul_(row, row, value=-1)
        # the pivot changes places with the column whose turn it would be
        moved = torch.where(panel.place == turn, place, panel.place)
        moved = torch.where(column == pivot, turn, moved)
        torch.where(enough, moved, panel.place, out=panel.place)


def _row_of(gram: torch.Tensor, pivot: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return row `pivot [b, 1]` of each symmetric `gram [b, n, n]` from its lower triangle, `[b, n, 1]`."""
    number = pivot.unsqueeze(2)
    before = gram.gather(1, number.expand(-1, 1, len(column))).mT
    after = gram.gather(2, number.expand(-1, len(column), 1))
    return torch.where((column <= pivot).unsqueeze(2), before, after)
