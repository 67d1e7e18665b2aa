"""Column pivots from a Gram: which columns of A span the rest best (the skeleton)."""

import torch
from oneshot_kernels import pivoted_cholesky


def weighted_pivots(gram: torch.Tensor, column_weights: torch.Tensor, *, rank: int) -> torch.Tensor:
    """The first `rank` Businger–Golub pivots of `A diag(c)` from `gram = AᵀA (n, n)` and `c (n,)`; int64 `(rank,)`.

    They are the pivots of a pivoted Cholesky of `diag(c) AᵀA diag(c)` (exact arithmetic; STAT A.3 for the weights).
    """
    weights = column_weights.double()
    scaled = gram.double() * weights * weights.unsqueeze(1)
    return pivoted_cholesky(scaled).pivots[:rank]


def pivots_with_quota(gram: torch.Tensor, class_of: torch.Tensor, *, quota: int) -> torch.Tensor:
    """Greedy column pivots that take exactly `quota` columns of every class; int64 `(quota · classes,)`.

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
        pivot = torch.where(eligible, remainder.diagonal(), -torch.inf).argmax()
        scale = remainder[pivot, pivot]
        if scale > 0:
            remainder -= torch.outer(remainder[:, pivot], remainder[pivot]) / scale
        available[pivot] = False
        open_places[class_of[pivot]] -= 1
        pivots.append(pivot)
    return torch.stack(pivots)
