"""The two things that pivots can be chosen from, a Gram or a matrix, behind the three steps that choosing needs."""

from __future__ import annotations

import torch

from oneshot_kernels.pivoted_qr import pivoted_qr
from oneshot_kernels.pivoted_qr.cholesky import check_gram, leading_pivots_, pivoted_cholesky, rank_tolerance
from oneshot_kernels.pivoted_qr.factor import PivotedFactor, columns_without, trailing_errors


class GramColumns:
    """Columns of A known by G = AᵀA; what is projected out is a Schur complement."""

    def __init__(self, gram: torch.Tensor):
        check_gram(gram, None)
        self.count, self.device = gram.shape[0], gram.device
        self.gram = gram.double() if gram.device.type == "cpu" else gram
        self.schur = self.gram

    def winners(self, candidates: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first `count` pivots (fewer if there are fewer) among `candidates`, int64 column indices."""
        count = min(count, candidates.numel())
        return candidates[leading_pivots_(self.schur[candidates][:, candidates], count)]

    def project_out(self, chosen: torch.Tensor) -> bool:
        """Remove the span of `chosen` from every column; False when nothing above rounding was left to remove."""
        if float(self.schur.diagonal().amax()) <= rank_tolerance(self.gram.diagonal()):
            return False
        _, rows = _rows_of_r(self.schur, chosen)
        if self.schur is self.gram:  # which is the caller's, and is needed in the end
            self.schur = self.gram.clone()
        self.schur.addmm_(rows.mT, rows, alpha=-1)
        self.schur.index_fill_(0, chosen, 0.0)
        self.schur.index_fill_(1, chosen, 0.0)
        return True

    def factor(self, winners: torch.Tensor) -> PivotedFactor:
        """Factorise the original A, pivoted, with `winners` first, themselves in pivoted order."""
        order, rows = _rows_of_r(self.gram, winners)
        pivots = _complete(order, self.count)
        r = rows[:, pivots].triu_()
        residual = self.gram.diagonal()[pivots] - r.square().sum(dim=0)
        return PivotedFactor(pivots, trailing_errors(r, residual[r.shape[0] :]), r)


class MatrixColumns:
    """Columns of A itself: slower, but the condition number is not squared."""

    def __init__(self, matrix: torch.Tensor):
        self.count, self.device = matrix.shape[1], matrix.device
        self.matrix = self.rest = matrix

    def winners(self, candidates: torch.Tensor, count: int) -> torch.Tensor:
        return candidates[_qr(self.rest[:, candidates]).pivots[: min(count, candidates.numel())]]

    def project_out(self, chosen: torch.Tensor) -> bool:
        size, rounding = torch.linalg.vector_norm(self.rest), torch.finfo(self.matrix.dtype).eps * self.count
        if float(size) <= rounding * float(torch.linalg.vector_norm(self.matrix)):
            return False
        orthonormal, _ = torch.linalg.qr(self.rest[:, chosen])
        self.rest = torch.addmm(self.rest, orthonormal, orthonormal.mT @ self.rest, alpha=-1)
        self.rest.index_fill_(1, chosen, 0.0)
        return True

    def factor(self, winners: torch.Tensor) -> PivotedFactor:
        pilot = _qr(self.matrix[:, winners])
        found = pilot.factorised_rank
        pivots = _complete(winners[pilot.pivots], self.count)
        permuted = self.matrix[:, pivots]
        orthonormal, _ = torch.linalg.qr(permuted[:, :found])
        r = (orthonormal.mT @ permuted).triu_()
        residual = torch.addmm(permuted[:, found:], orthonormal, r[:, found:], alpha=-1)
        return PivotedFactor(pivots, trailing_errors(r, residual.double().square().sum(dim=0)), r)


Columns = GramColumns | MatrixColumns  # less what has been projected out of them


def columns_of(gram: torch.Tensor | None, matrix: torch.Tensor | None, group_size: int, rank: int) -> Columns:
    """Return the source that the caller gave; raises ValueError unless it is exactly one and the sizes fit it."""
    if (gram is None) == (matrix is None):
        raise ValueError("give either gram= or matrix=")
    columns: Columns = GramColumns(gram) if gram is not None else MatrixColumns(matrix)  # type: ignore[arg-type]
    if not 0 <= rank <= columns.count:
        raise ValueError(f"rank {rank} is outside [0, {columns.count}]")
    if group_size < 1:
        raise ValueError(f"group_size {group_size} is below 1")
    return columns


def _qr(matrix: torch.Tensor) -> PivotedFactor:
    """Factorise R of an unpivoted QR of a tall `matrix`: the same pivots, the tall part in BLAS-3 (TSQR)."""
    if matrix.shape[0] > matrix.shape[1]:
        _, matrix = torch.linalg.qr(matrix, mode="r")
    return pivoted_qr(matrix, method="lapack" if matrix.device.type == "cpu" else "randomized")


def _rows_of_r(gram: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (`chosen` in pivoted order, R's rows [k, n] of the numerically independent ones over all columns)."""
    inner = pivoted_cholesky(gram[chosen][:, chosen])
    order, found = chosen[inner.pivots], inner.factorised_rank
    rows = torch.linalg.solve_triangular(inner.r[:, :found].mT, gram[order[:found]], upper=False)
    return order, rows


def _complete(order: torch.Tensor, count: int) -> torch.Tensor:
    """Return `order` followed by the columns it lacks, in index order."""
    return torch.cat([order, columns_without(order, count)])
