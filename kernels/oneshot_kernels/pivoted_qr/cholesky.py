"""Pivoted Cholesky of a Gram matrix: the column pivots of A, without A."""

from __future__ import annotations

import torch
from scipy.linalg import lapack

from oneshot_kernels.backend import choose_backend
from oneshot_kernels.pivoted_qr import reference
from oneshot_kernels.pivoted_qr.factor import PivotedFactor, empty_factor, trailing_errors


def pivoted_cholesky(gram: torch.Tensor, *, rank: int | None = None, block_size: int = 64) -> PivotedFactor:
    """Column pivots of A from G = AᵀA:  G[pivots][:, pivots] = rᵀ r + (the Schur complement after `rank`).

    In exact arithmetic these are the Businger–Golub pivots of A, and r is its R (Higham, *Accuracy and Stability*,
    2nd ed., §10.3; LAPACK Working Note 161). The condition number is squared: directions of A below √eps ‖A‖ are
    rounding. Columns whose remaining squared norm is at most n · eps · max diag(G) are not factorised; they follow
    in index order.

    gram        [n, n] fp64 or fp32, symmetric positive semidefinite (symmetry is assumed, not checked). fp32
                is factorised in fp64 on the CPU and as it is elsewhere.
    rank        stop after this many pivots (None: all).
    block_size  columns per BLAS-3 update of the torch version (devices other than the CPU).

    Raises ValueError for a Gram that is not square, not finite, or a rank outside [0, n].
    Cost n³/3 flops, two copies of G. On the CPU LAPACK `pstrf` (faster than the torch version at n = 1536, where we
    measured, see benchmarks/kernels.py); elsewhere `blocked_pivoted_cholesky`. Deterministic on one machine.
    """
    rank = check_gram(gram, rank)
    if choose_backend(gram) == "reference":
        return reference.pivoted_cholesky(gram, rank)
    if gram.device.type == "cpu":
        return _lapack_pivoted_cholesky(gram.double(), rank, overwrite=gram.dtype != torch.float64)
    return blocked_pivoted_cholesky(gram, rank=rank, block_size=block_size)


def cholesky_pivots_(gram: torch.Tensor, *, rank: int) -> torch.Tensor:
    """The first `rank` pivots of `pivoted_cholesky` alone, int64[rank]; `gram` is destroyed.

    On the CPU LAPACK works inside `gram` (fp64, contiguous), so that no second n × n matrix is made: for callers who
    need no factor. Columns beyond the numerical rank follow in LAPACK's order. Raises and costs as `pivoted_cholesky`.
    """
    rank = check_gram(gram, rank)
    in_place = gram.device.type == "cpu" and gram.dtype == torch.float64 and gram.is_contiguous()
    if not in_place or choose_backend(gram) == "reference" or gram.numel() == 0:
        return pivoted_cholesky(gram, rank=rank).pivots[:rank]
    return _pstrf(gram, overwrite=True)[1][:rank]


def check_gram(gram: torch.Tensor, rank: int | None) -> int:
    """The rank to reach; raises ValueError where `gram` cannot be a Gram matrix."""
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise ValueError(f"a Gram matrix is square, got shape {tuple(gram.shape)}")
    if gram.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"a Gram matrix is fp32 or fp64, got {gram.dtype}")
    if gram.numel() > 0 and not bool(torch.isfinite(torch.stack(gram.aminmax())).all()):
        raise ValueError("the Gram matrix has entries that are not finite")
    num_columns = gram.shape[0]
    if rank is not None and not 0 <= rank <= num_columns:
        raise ValueError(f"rank {rank} is outside [0, {num_columns}]")
    return num_columns if rank is None else rank


def rank_tolerance(diagonal: torch.Tensor) -> float:
    """n · eps · max diag(G): squared column norms up to this are rounding (LAPACK's default for `pstrf`)."""
    return diagonal.numel() * torch.finfo(diagonal.dtype).eps * float(diagonal.max())


def finish_factor(r: torch.Tensor, taken: torch.Tensor, residual_squares: torch.Tensor) -> PivotedFactor:
    """The record, from `r` [k, n] and `residual_squares` [n] in the original column order , and the pivots `taken`."""
    rest = torch.ones(r.shape[1], dtype=torch.bool, device=r.device)
    rest[taken] = False
    remaining = rest.nonzero().squeeze(1)
    pivots = torch.cat([taken, remaining])
    factor = r[:, pivots].triu_()
    return PivotedFactor(pivots, trailing_errors(factor, residual_squares[remaining]), factor)


def _lapack_pivoted_cholesky(gram: torch.Tensor, rank: int, overwrite: bool) -> PivotedFactor:
    """By `pstrf`, which destroys an fp64 `gram` where `overwrite`."""
    num_columns = gram.shape[0]
    diagonal = gram.diagonal().clone()
    if num_columns == 0 or float(diagonal.max()) <= 0:
        return empty_factor(num_columns, gram.dtype, gram.device)
    lower, order, numerical_rank = _pstrf(gram, overwrite)
    rank = min(rank, numerical_rank)
    pivots = torch.cat([order[:rank], order[rank:].sort().values])
    r = lower.mT[:rank].triu_()
    if rank < num_columns:  # the columns after `rank` go back into index order
        r[:, rank:] = r[:, rank + order[rank:].argsort()]
    residual_squares = diagonal[pivots[rank:]] - r[:, rank:].square().sum(dim=0)
    return PivotedFactor(pivots, trailing_errors(r, residual_squares), r)


def _pstrf(gram: torch.Tensor, overwrite: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(lower factor, int64 order of all columns, numerical rank) of an fp64 `gram`."""
    # The transpose of a row-major array is column-major, as LAPACK wants; lower=1 then reads G's upper triangle.
    tolerance = rank_tolerance(gram.diagonal())
    lower, order, rank, status = lapack.dpstrf(gram.mT.numpy(), tol=tolerance, lower=1, overwrite_a=overwrite)
    if status < 0:
        raise ValueError(f"LAPACK dpstrf: argument {-status} is illegal")
    return torch.from_numpy(lower), torch.from_numpy(order.astype("int64") - 1), int(rank)


def blocked_pivoted_cholesky(gram: torch.Tensor, *, rank: int | None = None, block_size: int = 64) -> PivotedFactor:
    """The same factorisation in torch alone, on any device and in the Gram's own dtype (see `pivoted_cholesky`).

    Within a block of `block_size` pivots the columns are updated one at a time (BLAS-2); the Schur complement of the
    columns not yet taken is then updated by one GEMM and compacted. The device is waited for once a block, not once
    a column. Cost 2 n³/3 flops (the GEMM does not use symmetry).
    """
    rank = check_gram(gram, rank)
    num_columns = gram.shape[0]
    if num_columns == 0 or float(gram.diagonal().max()) <= 0:
        return empty_factor(num_columns, gram.dtype, gram.device)
    tolerance = rank_tolerance(gram.diagonal())
    r = gram.new_zeros(rank, num_columns)
    taken = torch.empty(0, dtype=torch.int64, device=gram.device)
    columns = torch.arange(num_columns, device=gram.device)  # original index of each row of the Schur complement
    schur = gram.clone()
    while taken.numel() < rank:
        width = min(block_size, rank - taken.numel())
        block, chosen = _eliminate_block(schur, width, tolerance)
        r[taken.numel() : taken.numel() + chosen.numel(), columns] = block
        taken = torch.cat([taken, columns[chosen]])
        if chosen.numel() < width:
            break
        rest = torch.ones_like(columns, dtype=torch.bool)
        rest[chosen] = False
        schur = torch.addmm(schur[rest][:, rest], block[:, rest].mT, block[:, rest], alpha=-1)
        columns = columns[rest]
    r = r[: taken.numel()]
    return finish_factor(r, taken, gram.diagonal() - r.square().sum(dim=0))


def _eliminate_block(schur: torch.Tensor, width: int, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to `width` greedy pivots of `schur`: their rows of R [found, n] and their positions [found].

    A pivot at or below the tolerance writes zeros; so do all that follow, and they are cut off at the end.
    """
    diagonal = schur.diagonal().clone()
    block = schur.new_zeros(width, schur.shape[0])
    chosen = torch.empty(width, dtype=torch.int64, device=schur.device)
    found = torch.zeros(width, dtype=torch.bool, device=schur.device)
    for step in range(width):
        pivot = diagonal.argmax().reshape(1)
        size = diagonal[pivot]
        found[step : step + 1] = size > tolerance
        row = schur[pivot][0] - block[:step, pivot].squeeze(1) @ block[:step]
        row = torch.where((size > tolerance) & (diagonal > -torch.inf), row / size.clamp_min(tolerance).sqrt(), 0)
        row[pivot] = torch.where(size > tolerance, size.clamp_min(tolerance).sqrt(), 0)
        block[step] = row
        diagonal -= row.square()
        diagonal[pivot] = -torch.inf
        chosen[step : step + 1] = pivot
    count = int(found.sum())
    return block[:count], chosen[:count]
