"""Pivoted factorisations in plain NumPy, fp64, one column at a time: what the fast versions are tested against."""

from __future__ import annotations

import numpy as np
import torch

from oneshot_kernels.pivoted_qr.factor import PivotedFactor


def pivoted_qr(matrix: torch.Tensor, rank: int) -> PivotedFactor:
    """Factorise as Businger–Golub by modified Gram–Schmidt, twice, every norm computed anew. Ties: the lower index."""
    rest = matrix.double().cpu().numpy().copy()
    num_columns = rest.shape[1]
    smallest = np.finfo(float).eps * max(rest.shape) * np.linalg.norm(rest, axis=0).max(initial=0)
    directions: list[np.ndarray] = []
    pivots: list[int] = []
    for _ in range(rank):
        norms = np.linalg.norm(rest, axis=0)
        pivot = int(norms.argmax())
        if norms[pivot] <= smallest:
            break
        direction = rest[:, pivot] / norms[pivot]
        for earlier in directions:
            direction = direction - earlier * (earlier @ direction)
        direction /= np.linalg.norm(direction)
        rest -= np.outer(direction, direction @ rest)
        rest[:, pivot] = 0
        directions.append(direction)
        pivots.append(pivot)
    order = pivots + [column for column in range(num_columns) if column not in pivots]
    r = np.array([direction @ matrix.double().cpu().numpy() for direction in directions])
    r = r.reshape(len(directions), num_columns)
    return _factor(matrix, order, np.triu(r[:, order]), (rest[:, order] ** 2).sum(axis=0)[len(pivots) :])


def pivoted_cholesky(gram: torch.Tensor, rank: int) -> PivotedFactor:
    """Factorise by outer products, the largest remaining diagonal entry as the pivot. Ties: the lower index."""
    schur = gram.double().cpu().numpy().copy()
    num_columns = schur.shape[0]
    smallest = num_columns * np.finfo(float).eps * max(schur.diagonal().max(initial=0), 0)
    rows: list[np.ndarray] = []
    pivots: list[int] = []
    for _ in range(rank):
        diagonal = schur.diagonal().copy()
        diagonal[pivots] = -np.inf
        pivot = int(diagonal.argmax())
        if diagonal[pivot] <= smallest:
            break
        row = schur[pivot] / np.sqrt(diagonal[pivot])
        row[pivots] = 0
        schur -= np.outer(row, row)
        rows.append(row)
        pivots.append(pivot)
    order = pivots + [column for column in range(num_columns) if column not in pivots]
    r = np.array(rows).reshape(len(rows), num_columns)[:, order]
    return _factor(gram, order, np.triu(r), schur.diagonal()[order][len(pivots) :])


def _factor(like: torch.Tensor, order: list[int], r: np.ndarray, residual_squares: np.ndarray) -> PivotedFactor:
    squares = np.concatenate([(r**2).sum(axis=1), residual_squares.clip(min=0)])
    errors = [np.sqrt(squares[k:].sum()) for k in range(len(order))] + [0.0]
    # Up to the rank the columns after it all count; beyond it they leave one by one: both are suffix sums.
    device = like.device
    return PivotedFactor(
        torch.tensor(order, dtype=torch.int64, device=device),
        torch.tensor(errors, dtype=torch.float64, device=device),
        torch.from_numpy(np.ascontiguousarray(r)).to(device),
    )
