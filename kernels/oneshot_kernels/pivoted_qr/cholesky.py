"""Pivoted Cholesky of a Gram matrix: the column pivots of A, without A."""

from __future__ import annotations

import torch
from scipy.linalg import lapack

from oneshot_kernels.backend import choose_backend
from oneshot_kernels.pivoted_qr import reference
from oneshot_kernels.pivoted_qr.factor import PivotedFactor, empty_factor, trailing_errors
from oneshot_kernels.pivoted_qr.panels import WIDTH, eliminate_


def pivoted_cholesky(gram: torch.Tensor, *, rank: int | None = None, block_size: int = WIDTH) -> PivotedFactor:
    """Factorise G = AᵀA for A's column pivots:  G[pivots][:, pivots] = rᵀ r + (the Schur complement after `rank`).

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
    measured); elsewhere `blocked_pivoted_cholesky`. Deterministic on one machine.
    """
    rank = check_gram(gram, rank)
    if choose_backend(gram) == "reference":
        return reference.pivoted_cholesky(gram, rank)
    if gram.device.type == "cpu":
        return _lapack_pivoted_cholesky(gram.double(), rank, overwrite=gram.dtype != torch.float64)
    return blocked_pivoted_cholesky(gram, rank, block_size)


def cholesky_pivots_(gram: torch.Tensor, *, rank: int) -> torch.Tensor:
    """Return the first `rank` pivots of `pivoted_cholesky` alone, int64[rank]; `gram` is destroyed.

    A `gram` [b, n, n] is `b` Grams, each with pivots of its own: int64[b, rank]; a device takes them all at once.

    No second n × n matrix is made: on the CPU LAPACK works inside `gram` (fp64, contiguous), elsewhere
    `panels.eliminate_` does. Columns beyond the numerical rank follow in LAPACK's order. Raises as `pivoted_cholesky`;
    on a device the check for finite entries is the only wait.
    """
    if gram.ndim == 3 and (gram.device.type == "cpu" or choose_backend(gram) == "reference"):
        empty = torch.empty(0, rank, dtype=torch.int64, device=gram.device)
        return torch.stack([cholesky_pivots_(each, rank=rank) for each in gram]) if len(gram) else empty
    rank = check_gram(gram, rank, batched=True)
    if choose_backend(gram) != "reference" and gram.numel() > 0:
        if gram.device.type != "cpu":
            return eliminate_(gram.contiguous(), rank).order[..., :rank]
        if gram.dtype == torch.float64 and gram.is_contiguous():
            return _pstrf(gram, overwrite=True)[1][:rank]
    return pivoted_cholesky(gram, rank=rank).pivots[:rank]


def leading_pivots_(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Return `pivoted_cholesky(gram, rank=rank).pivots[:rank]`, on a device without the factor; `gram` is destroyed.

    On a device it is not waited for, so what has to be true of `gram` is not checked there.
    """
    if gram.device.type == "cpu" or choose_backend(gram) == "reference":
        return pivoted_cholesky(gram, rank=rank).pivots[:rank]
    return eliminate_(gram, rank).pivots()[:rank]


def check_gram(gram: torch.Tensor, rank: int | None, *, batched: bool = False) -> int:
    """Return the rank to reach; raises ValueError where `gram` cannot be a Gram matrix, or several if `batched`."""
    if gram.ndim not in ((2, 3) if batched else (2,)) or gram.shape[-2] != gram.shape[-1]:
        raise ValueError(f"a Gram matrix is square, got shape {tuple(gram.shape)}")
    if gram.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"a Gram matrix is fp32 or fp64, got {gram.dtype}")
    if gram.numel() > 0 and not bool(torch.isfinite(torch.stack(gram.aminmax())).all()):
        raise ValueError("the Gram matrix has entries that are not finite")
    num_columns = gram.shape[-1]
    if rank is not None and not 0 <= rank <= num_columns:
        raise ValueError(f"rank {rank} is outside [0, {num_columns}]")
    return num_columns if rank is None else rank


def rank_tolerance(diagonal: torch.Tensor) -> float:
    """Return n · eps · max diag(G): smaller squared column norms are rounding (LAPACK's default for `pstrf`)."""
    return diagonal.numel() * torch.finfo(diagonal.dtype).eps * float(diagonal.max())


def _lapack_pivoted_cholesky(gram: torch.Tensor, rank: int, overwrite: bool) -> PivotedFactor:
    """Factorise by `pstrf`, which destroys an fp64 `gram` where `overwrite`."""
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
    """Return (lower factor, int64 order of all columns, numerical rank) of an fp64 `gram`."""
    # The transpose of a row-major array is column-major, as LAPACK wants; lower=1 then reads G's upper triangle.
    tolerance = rank_tolerance(gram.diagonal())
    lower, order, rank, status = lapack.dpstrf(gram.mT.numpy(), tol=tolerance, lower=1, overwrite_a=overwrite)
    if status < 0:
        raise ValueError(f"LAPACK dpstrf: argument {-status} is illegal")
    return torch.from_numpy(lower), torch.from_numpy(order.astype("int64") - 1), int(rank)


def blocked_pivoted_cholesky(gram: torch.Tensor, rank: int, block_size: int) -> PivotedFactor:
    """Factorise by torch alone, on any device, in the Gram's own dtype.

    Within a block of `block_size` pivots rows of R are made one at a time (BLAS-2). Then one GEMM updates the whole
    Schur complement: `panels.eliminate_`. The device is waited for at the end, for the numerical rank.
    Cost n² rank flops (products update one triangle), a copy of G, and R twice.
    """
    if gram.numel() == 0:
        return empty_factor(0, gram.dtype, gram.device)
    rows = gram.new_empty(rank, gram.shape[0])
    done = eliminate_(gram.clone(), rank, rows=rows, width=block_size)
    found, pivots = int(done.found()), done.pivots()
    r = rows[:found].index_select(1, pivots).triu_()
    return PivotedFactor(pivots, trailing_errors(r, done.remainder[pivots[found:]]), r)
