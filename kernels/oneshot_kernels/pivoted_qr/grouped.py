"""Pivots from groups of columns: one round (STAT) or a tournament."""

from __future__ import annotations

import torch

from oneshot_kernels.pivoted_qr.columns import Columns, columns_of
from oneshot_kernels.pivoted_qr.factor import PivotedFactor, columns_without


def grouped_pivots(
    *, gram: torch.Tensor | None = None, matrix: torch.Tensor | None = None, group_size: int, rank: int
) -> PivotedFactor:
    """Split the columns into consecutive groups, pivot each alone, keep the winners of all (STAT §3.4).

    Group g with n_g columns keeps its share rank · n_g / n (whole numbers by largest remainder), so the choice depends
    on `rank`. The winners are then factorised together, in pivoted order: in the factor returned every k <= rank is the
    best k *of these winners* with its exact error; beyond rank the columns follow in index order and the errors
    are upper bounds.

    gram [n, n] or matrix [m, n] (exactly one, fp32 or fp64); 1 <= group_size; 0 <= rank <= n, else ValueError.
    Columns that repeat in different groups can both win: the price of one round. Deterministic.
    Cost n group_size²/3 flops for the groups from a Gram (4 m n group_size from a matrix), and rank² n for the factor.
    """
    columns = columns_of(gram, matrix, group_size, rank)
    groups = torch.arange(columns.count, device=columns.device).split(group_size)
    shares = _shares([group.numel() for group in groups], rank)
    chosen = [columns.winners(group, share) for group, share in zip(groups, shares, strict=True) if share > 0]
    return columns.factor(torch.cat(chosen) if chosen else torch.arange(0, device=columns.device))


def tournament_pivots(
    *, gram: torch.Tensor | None = None, matrix: torch.Tensor | None = None, group_size: int, rank: int
) -> PivotedFactor:
    """Choose by tournaments (Demmel, Grigori, Gu, Xiang 2015, doi:10.1137/13092157X): CARRQR, panel by panel.

    A panel of b = group_size / 2 pivots is chosen by a binary tournament: groups of 2 b columns each send their first b
    pivots on, winners meet in pairs until b are left. The panel is projected out of all columns before the next one.
    The pivots so found do not depend on `rank` but for the last panel; they are then ordered and factorised as in
    `grouped_pivots`, with the same meaning for k <= rank and beyond it.

    Arguments, errors and determinism as `grouped_pivots`. Cost 2 n² rank flops from a Gram (4 m n rank from a matrix).
    """
    columns = columns_of(gram, matrix, group_size, rank)
    remaining = torch.arange(columns.count, device=columns.device)
    panels = [remaining[:0]]
    taken = 0
    while taken < rank:
        width = min(max(group_size // 2, 1), rank - taken)
        panel = _tournament(columns, remaining, width)
        if not columns.project_out(panel):  # only rounding is left: any columns will do
            panels.append(remaining[: rank - taken])
            break
        panels.append(panel)
        taken += width
        remaining = columns_without(torch.cat(panels), columns.count)
    return columns.factor(torch.cat(panels))


def _tournament(columns: Columns, candidates: torch.Tensor, width: int) -> torch.Tensor:
    """Return the `width` winners of a binary tournament among `candidates`."""
    entrants = list(candidates.split(2 * width))
    while True:
        entrants = [columns.winners(group, width) for group in entrants]
        if len(entrants) == 1:
            return entrants[0]
        entrants = [torch.cat(entrants[i : i + 2]) for i in range(0, len(entrants), 2)]


def _shares(sizes: list[int], total: int) -> list[int]:
    """Divide `total` in proportion to `sizes`, whole numbers by largest remainder (ties: the earlier group)."""
    whole = max(1, sum(sizes))
    shares = [total * size // whole for size in sizes]
    remainders = [total * size % whole for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (-remainders[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
