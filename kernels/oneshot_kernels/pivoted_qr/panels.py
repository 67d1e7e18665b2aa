"""Pivoted Cholesky for devices: inside the Gram's own memory, in panels of pivots, without a wait for the device.

Nothing is moved and nothing is cut off. A column that was taken stays where it is, and its place in LAPACK's order says
that it is taken. So every panel does the same work at the same addresses. On CUDA the first panel is launched kernel by
kernel, and the later ones replay a graph of it, because the launches of a pivot take longer than its arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from oneshot_kernels import backend

WIDTH = 128  # pivots between two updates of the whole Gram
UPDATED_COLUMNS = 1024  # of one product of the update, which needs one triangle of the Gram only
FEWEST_PANELS = 3  # that are worth the capture of a graph


@dataclass(frozen=True)
class Elimination:
    """The results of `eliminate_`, all on the device; with a first dimension `b` for `b` Grams.

    order      int64[n]: the columns as LAPACK's `dpstrf` orders them. Those beyond the numerical rank are where its
               exchanges have put them.
    sizes      [rank]: the squared norm of each pivot when it was taken; infinite beyond the numerical rank.
    remainder  [n], in the Gram's order: what is left of the diagonal. Meaningless for columns that were taken.
    """

    order: torch.Tensor
    sizes: torch.Tensor
    remainder: torch.Tensor

    def found(self) -> torch.Tensor:
        """Return the number of pivots above the tolerance, int64[] or int64[b]."""
        return self.sizes.isfinite().sum(-1)

    def pivots(self) -> torch.Tensor:
        """Return `order` with the columns after the last pivot in index order; does not wait for a count."""
        place = torch.arange(self.order.shape[-1], device=self.order.device)
        key = torch.where(place < self.found().unsqueeze(-1), place, self.order + self.order.shape[-1])
        return self.order.gather(-1, key.argsort(-1))


class Panel:
    """What one panel of `width` pivots of `b` Grams reads and writes: fixed memory, so that a graph can replay it.

    gram       [b, n, n]: the Schur complement after the panels before, in its lower triangle.
    rows       [b, n, width]: rows of R, transposed; zero in columns that were taken before.
    remainder  [b, n]: the diagonal of the Schur complement after the pivots so far.
    place      int64[b, n]: the place of each column in LAPACK's order; below `start + step` for those that were taken.
    sizes      [b, width]: the squared norms of the panel's pivots, infinite where none was large enough.
    tolerance  [b, 1]: n · eps · max diag(G) (LAPACK's), infinite after a pivot that was not above it.
    start      int64[1]: pivots of the panels before.
    limit      pivots to take in all.
    """

    def __init__(self, gram: torch.Tensor, width: int, limit: int) -> None:
        count, num_columns, _ = gram.shape
        self.gram, self.limit = gram, limit
        self.rows = gram.new_zeros(count, num_columns, width)
        self.remainder = gram.diagonal(dim1=1, dim2=2).clone()
        rounding = num_columns * torch.finfo(gram.dtype).eps
        self.tolerance = self.remainder.amax(1, keepdim=True) * rounding
        self.place = torch.arange(num_columns, device=gram.device).repeat(count, 1)
        self.sizes = gram.new_empty(count, width)
        self.start = torch.zeros(1, dtype=torch.int64, device=gram.device)

    @property
    def width(self) -> int:
        """The pivots of one panel."""
        return self.rows.shape[2]

    def close(self) -> None:
        """Subtract the panel's part from the lower triangle of the Gram, and let the next panel start."""
        for first in range(0, self.gram.shape[1], UPDATED_COLUMNS):
            rows = self.rows[:, first:]
            self.gram[:, first:, first : first + UPDATED_COLUMNS].baddbmm_(rows, rows[:, :UPDATED_COLUMNS].mT, alpha=-1)
        self.tolerance.masked_fill_(self.sizes[:, -1:].isinf(), torch.inf)
        self.start.add_(self.width)


def eliminate_(gram: torch.Tensor, rank: int, *, rows: torch.Tensor | None = None, width: int = WIDTH) -> Elimination:
    """Take up to `rank` greedy pivots of `gram`, which is destroyed, by right-looking pivoted Cholesky.

    The rules are LAPACK's, of `dpstrf` (LAPACK Working Note 161). The largest remaining diagonal entry is the next
    pivot, and the first one in the present order where several are equal. It ends at n · eps · max diag(G).

    gram   [n, n] or [b, n, n] fp32 or fp64, contiguous, symmetric positive semidefinite, on any device; arithmetic is
           in its dtype. Each of `b` Grams has pivots of its own.
    rows   [rank, n] (None: not wanted; for one Gram only) takes the rows of R in the Gram's column order. They are zero
           beyond the numerical rank, and in columns taken before.
    width  pivots between two updates of `gram`.
    Cost n² rank flops, width · n numbers beside each Gram; the device is not waited for. Deterministic on one device.
    """
    grams = gram if gram.ndim == 3 else gram.unsqueeze(0)
    panel = Panel(grams, max(1, min(width, rank)), rank)
    take_pivots_ = _implementation(grams)
    sizes = gram.new_empty(len(grams), rank)
    run: Callable[[], None] = partial(_whole_panel, panel, take_pivots_)
    starts = range(0, rank, panel.width)
    for start in starts:
        if start == panel.width and len(starts) >= FEWEST_PANELS and backend.runs_on_gpu(gram):
            run = _captured(run).replay
        run()
        taken = min(panel.width, rank - start)
        sizes[:, start : start + taken] = panel.sizes[:, :taken]
        if rows is not None:
            rows[start : start + taken] = panel.rows[0, :, :taken].mT
    numbers = torch.arange(grams.shape[1], device=gram.device).expand_as(panel.place)
    done = Elimination(torch.empty_like(panel.place).scatter_(1, panel.place, numbers), sizes, panel.remainder)
    if gram.ndim == 3:
        return done
    return Elimination(done.order[0], done.sizes[0], done.remainder[0])


def _whole_panel(panel: Panel, take_pivots_: Callable[[Panel], None]) -> None:
    take_pivots_(panel)
    panel.close()


def _implementation(gram: torch.Tensor) -> Callable[[Panel], None]:
    """Return the function that takes the pivots of a panel: one Triton kernel a pivot, or torch's small kernels."""
    if backend.choose_backend(gram, default="triton" if backend.triton_runs_on(gram) else "torch") == "triton":
        return _take_by_triton_
    from oneshot_kernels.pivoted_qr.torch_panel import take_pivots_

    return take_pivots_


def _take_by_triton_(panel: Panel) -> None:
    with backend.explained("pivoted_qr.take_pivots_", panel.gram):
        from oneshot_kernels.pivoted_qr.triton_panel import take_pivots_

        take_pivots_(panel)


def _captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of what `work` launches, which has run before, so that its kernels are compiled and loaded.

    `torch.cuda.graph` would give all cached memory back to the driver first. Threads that copy layers meanwhile are not
    part of the capture, and may allocate.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
