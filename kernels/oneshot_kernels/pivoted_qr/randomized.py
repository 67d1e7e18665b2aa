"""Pivoted QR of a tall matrix in GEMMs: pivot on a small sketch, precondition with it, then unpivoted CholeskyQR."""

from __future__ import annotations

import torch

from oneshot_kernels.count_sketch import sketch_
from oneshot_kernels.pivoted_qr.factor import PivotedFactor, columns_without, trailing_errors
from oneshot_kernels.pivoted_qr.lapack import lapack_pivoted_qr

SKETCH_NONZEROS = 4  # per column of S: 1, CountSketch, fails on coherent rows
OVERSAMPLING = 8  # sketch rows beyond the block size, as in HQRRP and BQRRP
TRUSTED_PIVOT_RATIO = 1e-3  # preconditioned columns have κ = O(1); a smaller ratio means that the sketch misled


def bqrrp(matrix: torch.Tensor, rank: int, seed: int, *, block_size: int = 128) -> PivotedFactor:
    """Take one block of pivots at a time, from a sketch with block_size + 8 rows: BQRRP.

    Melnichenko, Murray, Killian et al., arXiv:2507.00976; the scheme of Duersch & Gu 2017, doi:10.1137/15M1044680.

    Each block: greedy pivots of the sketch; CholeskyQR of those columns, preconditioned by the sketch's own R; one
    GEMM updates A; M ← M2 - M1 R11⁻¹ R12 updates the sketch without a pass over A. The condition number is not
    squared, so the error curve holds down to eps ‖A‖. Cost about 4 m n² flops, nearly all GEMMs, and one copy of A.
    """
    work = matrix.clone()
    columns = torch.arange(matrix.shape[1], device=matrix.device)  # original index of each column of `work`
    sketch_size = min(block_size + OVERSAMPLING, matrix.shape[0])
    sketched = _sketch(matrix, sketch_size, seed)
    largest = float(torch.linalg.vector_norm(sketched, dim=0).amax())
    tolerance = largest * torch.finfo(matrix.dtype).eps * max(matrix.shape)
    r = matrix.new_zeros(rank, matrix.shape[1])
    taken = columns[:0]
    while taken.numel() < rank:
        width = min(block_size, rank - taken.numel())
        chosen, sketch_r = pivots_of_sketch(sketched, width, tolerance)
        if chosen.numel() == 0:
            break
        rest = columns_without(chosen, columns.numel())
        r11, orthonormal = preconditioned_cholesky_qr(work[:, chosen], sketch_r)
        r12 = orthonormal.mT @ work[:, rest]
        rows = slice(taken.numel(), taken.numel() + chosen.numel())
        r[rows, columns[chosen]] = r11
        r[rows, columns[rest]] = r12
        coefficients = torch.linalg.solve_triangular(r11, r12, upper=True)
        sketched = torch.addmm(sketched[:, rest], sketched[:, chosen], coefficients, alpha=-1)
        work = torch.addmm(work[:, rest], orthonormal, r12, alpha=-1)
        taken, columns = torch.cat([taken, columns[chosen]]), columns[rest]
        if chosen.numel() < width:  # the sketch is used up: is the matrix?
            sketched = _sketch(work, sketch_size, seed + taken.numel())
    pivots = torch.cat([taken, columns])
    r = r[: taken.numel(), pivots]
    return PivotedFactor(pivots, trailing_errors(r, work.double().square().sum(dim=0)), r)


def preconditioned_cholesky_qr(panel: torch.Tensor, pilot_r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (R, Q) of `panel` [m, k] by CholeskyQR of panel · pilot_r⁻¹, `pilot_r` [k, k] the R of a sketch of it.

    Where the Gram is not safely positive definite (the sketch missed a direction) Householder QR is used instead: it
    is slower and needs no luck.
    """
    conditioned = torch.linalg.solve_triangular(pilot_r, panel, upper=True, left=False)
    lower, failed_at = torch.linalg.cholesky_ex(conditioned.mT @ conditioned)
    diagonal = lower.diagonal()
    if int(failed_at) or float(diagonal.amin()) < TRUSTED_PIVOT_RATIO * float(diagonal.amax()):
        orthonormal, r = torch.linalg.qr(panel)
        return r, orthonormal
    return lower.mT @ pilot_r, torch.linalg.solve_triangular(lower.mT, conditioned, upper=True, left=False)


def pivots_of_sketch(sketched: torch.Tensor, count: int, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `greedy_pivots` does, on the CPU by LAPACK's geqp3: the sketch is small, and a loop costs more there."""
    if sketched.device.type != "cpu":
        return greedy_pivots(sketched, count, tolerance)
    factor = lapack_pivoted_qr(sketched, count)
    found = int((factor.r.diagonal().abs() > tolerance).sum())
    return factor.pivots[:found], factor.r[:found, :found].to(sketched.dtype)


def greedy_pivots(sketched: torch.Tensor, count: int, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Take up to `count` Businger–Golub pivots of the wide `sketched` [s, n], by modified Gram–Schmidt.

    Returns (chosen int64[k], R [k, k] of those columns). Stops where no column's remaining norm exceeds `tolerance`,
    and where the sketch's rows are used up. Cost 4 s n k flops and ten small kernels a pivot; the device is waited for
    once, at the end: pivots at or below the tolerance remove nothing, and they are cut off.
    """
    count = min(count, *sketched.shape)
    rest = sketched.clone()
    rows = sketched.new_empty(count, sketched.shape[1])
    sizes = sketched.new_empty(count)
    chosen = torch.empty(count, dtype=torch.int64, device=sketched.device)
    infinite = sketched.new_full((1,), torch.inf)
    for step in range(count):
        size_of = sizes[step : step + 1]
        size, pivot = torch.linalg.vector_norm(rest, dim=0).max(dim=0, keepdim=True)
        torch.where(size > tolerance, size, infinite, out=size_of)
        direction = rest.index_select(1, pivot).squeeze(1).div_(size_of)
        torch.mv(rest.mT, direction, out=rows[step])
        rest.addr_(direction, rows[step], alpha=-1)
        rest.index_fill_(1, pivot, 0.0)
        chosen[step : step + 1].copy_(pivot)
    positions = chosen[: int(sizes.isfinite().sum())]
    return positions, rows[: positions.numel()].index_select(1, positions).triu_()


def _sketch(matrix: torch.Tensor, sketch_size: int, seed: int) -> torch.Tensor:
    """Return S A, or A itself where S would have as many rows."""
    if sketch_size >= matrix.shape[0]:
        return matrix
    nonzeros = min(SKETCH_NONZEROS, sketch_size)
    out = matrix.new_zeros(sketch_size, matrix.shape[1])
    return sketch_(out, matrix, row_offset=0, seed=seed, nonzeros=nonzeros)
