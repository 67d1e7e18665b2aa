"""Pivoted Cholesky for devices: inside the Gram's own memory, 15 small kernels a pivot, no wait for the device.

Nothing is moved and nothing is cut off: a column that was taken stays where it is, and the list of columns says where
the candidates are. So all shapes are known beforehand, and the host only has to keep the device's queue full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WIDTH = 64  # pivots between two updates of the whole Gram


@dataclass(frozen=True)
class Elimination:
    """The results of `eliminate_`, all on the device.

    order      int64[n]: the columns as LAPACK's `dpstrf` orders them. Those beyond the numerical rank are where its
               exchanges have put them.
    sizes      [rank]: the squared norm of each pivot when it was taken; infinite beyond the numerical rank.
    remainder  [n], in the Gram's order: what is left of the diagonal. Meaningless for columns that were taken.
    """

    order: torch.Tensor
    sizes: torch.Tensor
    remainder: torch.Tensor

    def found(self) -> torch.Tensor:
        """Return the number of pivots above the tolerance, int64[]."""
        return self.sizes.isfinite().sum()

    def pivots(self) -> torch.Tensor:
        """Return `order` with the columns after the last pivot in index order, int64[n]; does not wait for a count."""
        place = torch.arange(self.order.numel(), device=self.order.device)
        key = torch.where(place < self.found(), place, self.order + self.order.numel())
        return self.order.index_select(0, key.argsort())


def eliminate_(gram: torch.Tensor, rank: int, *, rows: torch.Tensor | None = None, width: int = WIDTH) -> Elimination:
    """Take up to `rank` greedy pivots of `gram`, which is destroyed, by right-looking pivoted Cholesky.

    The rules are those of LAPACK's `dpstrf` (LAPACK Working Note 161). The largest remaining diagonal entry is the next
    pivot, and the first one in the present order where several are equal. It ends at n · eps · max diag(G).

    gram   [n, n] fp32 or fp64, symmetric positive semidefinite, on any device; arithmetic is in its dtype.
    rows   [rank, n] (None: not wanted) takes the rows of R in the Gram's column order. Beyond the numerical rank they
           are zero; in columns taken before they hold rounding.
    width  pivots between two updates of `gram`.
    Cost 2 n² rank flops, width · n numbers beside `gram`; the device is not waited for. Deterministic on one device.
    """
    num_columns = gram.shape[0]
    order = torch.arange(num_columns, device=gram.device)
    sizes = gram.new_empty(rank)
    remainder = gram.diagonal().clone()
    if rank == 0:
        return Elimination(order, sizes, remainder)
    tolerance = remainder.max() * (num_columns * torch.finfo(gram.dtype).eps)
    infinite = gram.new_full((1,), torch.inf)
    reused = gram.new_empty(min(width, rank), num_columns) if rows is None else None
    for start in range(0, rank, width):
        stop = min(start + width, rank)
        panel = reused[: stop - start] if reused is not None else rows[start:stop]  # type: ignore[index]
        for step in range(stop - start):
            candidates, size_of = order[start + step :], sizes[start + step : start + step + 1]
            pivot = _take(candidates, remainder, size_of, tolerance, infinite)
            row = gram.index_select(0, pivot).view(num_columns)
            if step > 0:
                row.addmv_(panel[:step].mT, panel[:step].index_select(1, pivot).view(step), alpha=-1)
            torch.mul(row, size_of.rsqrt(), out=panel[step])  # 1/√∞ is 0: nothing is removed beyond the rank
            remainder.addcmul_(panel[step], panel[step], value=-1)
        if stop < rank:
            # Rows and columns that were taken are updated, too; what is in them reaches no other entry.
            gram.addmm_(panel.mT, panel, alpha=-1)
            remainder = gram.diagonal().clone()
    return Elimination(order, sizes, remainder)


def _take(
    candidates: torch.Tensor,
    remainder: torch.Tensor,
    size_of: torch.Tensor,
    tolerance: torch.Tensor,
    infinite: torch.Tensor,
) -> torch.Tensor:
    """Exchange the largest of `candidates` with the first; write its size, and return it, int64[1].

    Where none is above the tolerance nothing is exchanged and the size is infinite.
    """
    # No Python number is written through an index: on CUDA that waits for the device. Given to `where`, one would be
    # made a tensor first, by a kernel of its own.
    size, place = remainder.index_select(0, candidates).max(dim=0, keepdim=True)
    enough = size > tolerance
    torch.where(enough, size, infinite, out=size_of)
    place.mul_(enough)
    pivot = candidates.index_select(0, place)
    candidates.index_copy_(0, place, candidates[:1].clone())
    candidates[:1].copy_(pivot)
    return pivot
