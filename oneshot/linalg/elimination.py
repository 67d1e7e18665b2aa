"""Backward elimination: the columns that a corrected linear map misses least go first (optimal brain surgeon)."""

import torch

from oneshot.linalg.psd import RidgeFactor

STEPS = 128  # a whole elimination takes about this many
COLUMNS = "columns that are eliminated"


def eliminate(
    gram: torch.Tensor,
    weight: torch.Tensor,
    *,
    kept: int,
    block_size: int = 1,
    class_of: torch.Tensor | None = None,
    damping: float,
) -> torch.Tensor:
    """Return the blocks of columns that stay if the cheapest are removed and the rest corrected, repeatedly.

    Removing block B from the corrected map `W` costs `tr(W_B ((K⁻¹)_BB)⁻¹ W_Bᵀ)` of `‖A Wᵀ‖²`, and what remains becomes
    `W − W_B ((K⁻¹)_BB)⁻¹ (K⁻¹)_B,:` with `K = AᵀA + λI` (Hassibi and Stork 1993; on structures: ZipLM, Kurtić et al.
    2023, equations 2-4). Blocks of one column go several at a time, 1/128 of them, larger ones one by one.

    Args:
        gram: `AᵀA (n, n)`. weight: `(d, n)`. kept: blocks to keep, of every class where there are classes.
        block_size: neighbouring columns that go together. class_of: int64 `(blocks,)`; each class keeps `kept`.
        damping: λ in units of the Gram's mean diagonal.

    Returns:
        int64, ascending.

    Cost: n²·d + 2 n³ multiply-adds for n single columns; float64.
    """
    num_blocks = gram.shape[0] // block_size
    classes = (
        torch.zeros(num_blocks, dtype=torch.int64, device=gram.device) if class_of is None else class_of.to(gram.device)
    )
    identity = torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    # where A is zero all choices are equally good; those with the largest weights stay
    inverse = RidgeFactor(gram, damping, COLUMNS).solve(identity) if gram.diagonal().any() else identity
    remaining = weight.double().clone()
    alive = torch.ones(num_blocks, dtype=torch.bool, device=gram.device)
    surplus = torch.bincount(classes) - kept
    at_once = max(1, num_blocks // STEPS) if block_size == 1 and class_of is None else 1
    while (left := int(surplus.clamp_min(0).sum())) > 0:
        costs = _costs(inverse, remaining, block_size)
        costs[~alive | (surplus[classes] <= 0)] = torch.inf
        blocks = costs.topk(min(at_once, left), largest=False).indices
        columns = (blocks.unsqueeze(1) * block_size + torch.arange(block_size, device=gram.device)).flatten()
        step = torch.linalg.solve(inverse[columns.unsqueeze(1), columns], inverse[columns])
        remaining -= remaining[:, columns] @ step
        inverse -= inverse[:, columns] @ step
        inverse[columns, columns] = 1.0  # removed: any finite value, so that no block becomes singular
        alive[blocks] = False
        surplus -= torch.bincount(classes[blocks], minlength=len(surplus))
    return alive.nonzero().squeeze(1)


def _costs(inverse: torch.Tensor, weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return `tr(W_B ((K⁻¹)_BB)⁻¹ W_Bᵀ)` of every block."""
    if block_size == 1:
        return weight.square().sum(0) / inverse.diagonal()
    num_blocks = len(inverse) // block_size
    blocks = inverse.view(num_blocks, block_size, num_blocks, block_size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    parts = weight.view(-1, num_blocks, block_size).permute(1, 2, 0)
    return (parts * torch.linalg.solve(blocks, parts)).sum((1, 2))
