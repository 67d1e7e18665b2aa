"""Column pivots from a Gram or a sketch: which columns of A span the rest best (the skeleton)."""

import torch
from oneshot_kernels import cholesky_pivots_, grouped_pivots, pivoted_qr, tournament_pivots

GROUP_SIZE = 512


def weighted_pivots(
    gram: torch.Tensor,
    column_weights: torch.Tensor,
    *,
    rank: int,
    sketch: torch.Tensor | None = None,
    pivoting: str = "cholesky",
    group_size: int = GROUP_SIZE,
) -> torch.Tensor:
    """Return the first `rank` column pivots of `A diag(c)`, int64 `(rank,)` (STAT section 2; A.3 for the weights).

    Args:
        gram: `AᵀA (n, n)`. column_weights: `c (n,)`.
        sketch: `S A (s, n)`; where given, pivots come from it instead of the Gram (STAT section 3.4).
        pivoting: `cholesky`: pivoted Cholesky of `diag(c) AᵀA diag(c)`, in exact arithmetic the Businger–Golub pivots.
            `qr`: pivoted QR of the sketch. `grouped`: winners of groups of `group_size` columns (STAT section 3.4).
            `tournament`: full tournament pivoting (Demmel et al. 2015).

    Raises `ValueError` for an unknown pivoting, and for `qr` without a sketch.
    """
    weights = column_weights.double()
    if pivoting == "qr":
        if sketch is None:
            raise ValueError("pivoting 'qr' needs a sketch")
        return pivoted_qr(sketch.double() * weights, rank=min(rank, *sketch.shape)).pivots[:rank]
    if pivoting == "cholesky":
        square = gram if sketch is None else sketch.double().T @ sketch.double()
        return cholesky_pivots_(_scaled(square, weights), rank=rank)
    select = {"grouped": grouped_pivots, "tournament": tournament_pivots}.get(pivoting)
    if select is None:
        raise ValueError(f"unknown pivoting {pivoting!r}")
    if sketch is None:
        return select(gram=_scaled(gram, weights), group_size=group_size, rank=rank).pivots[:rank]
    return select(matrix=sketch.double() * weights, group_size=group_size, rank=rank).pivots[:rank]


def _scaled(gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `diag(c) G diag(c)` in float64, one copy."""
    return gram.to(torch.float64, copy=True).mul_(weights).mul_(weights.unsqueeze(1))


def pivots_with_quota(gram: torch.Tensor, class_of: torch.Tensor, *, quota: int) -> torch.Tensor:
    """Choose greedy column pivots that take exactly `quota` columns of every class; int64 `(quota · classes,)`.

    Pivoted Cholesky in which the columns of a class drop out once its quota is full. For small Grams (attention
    heads): one rank-one update of `gram (n, n)` per pivot, n²·(number of pivots) multiply-adds.

    Args:
        class_of: int64 `(n,)`, classes 0 … C−1, each with at least `quota` columns.
    """
    remainder = gram.double().clone()
    class_of = class_of.to(gram.device)
    num_classes = int(class_of.max()) + 1
    open_places = torch.full((num_classes,), quota, device=gram.device)
    available = torch.ones(len(gram), dtype=torch.bool, device=gram.device)
    pivots = []
    for _ in range(quota * num_classes):
        eligible = available & (open_places[class_of] > 0)
        # a pivot stays a tensor of one element, because as a number it would be waited for
        pivot = torch.where(eligible, remainder.diagonal(), -torch.inf).argmax(0, keepdim=True)
        row, column = remainder.index_select(0, pivot), remainder.index_select(1, pivot)
        scale = row.index_select(1, pivot)
        remainder -= torch.where(scale > 0, column * row / scale, 0.0)
        available.index_fill_(0, pivot, False)
        open_places -= (torch.arange(num_classes, device=gram.device) == class_of.index_select(0, pivot)).long()
        pivots.append(pivot)
    return torch.cat(pivots)
