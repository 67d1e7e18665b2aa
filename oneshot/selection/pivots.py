"""`id`: the columns that span the others best, as pivots of the output-weighted Gram or of a sketch (STAT)."""

from collections.abc import Sequence

import torch
from oneshot_kernels import cholesky_pivots_

from oneshot.linalg.pivoted_qr import pivots_with_quota, weighted_pivots
from oneshot.selection.evidence import Evidence, neuron_gram_bytes
from oneshot.selection.selector import DOUBLE, Blocks, Cost, Extent, Selector

PIVOT_ROWS = 140  # of a Gram, beside which a device takes pivots in the Gram's own memory


class Pivots(Selector):
    """Choose pivots: neurons by STAT sections 2 and 3.1, heads by section 3.2.

    Every block of columns, such as a head, is one long column (tokens × columns of the block), whose Gram is the sum
    over the block's columns.
    """

    takes_sketch = True

    def neurons(self, evidence: Evidence, kept: int) -> torch.Tensor:
        """Return the first pivots of the weighted activations."""
        pivots = weighted_pivots(
            *evidence.neurons(),
            rank=kept,
            sketch=evidence.sketch,
            pivoting=evidence.pivoting,
            group_size=evidence.group_size,
        )
        return pivots.sort().values

    def neurons_of_experts(self, evidence: Sequence[Evidence], kept: int) -> torch.Tensor:
        """Return the first pivots of every expert, found together if they come from the Gram."""
        if evidence[0].pivoting != "cholesky":
            return super().neurons_of_experts(evidence, kept)
        return pivots_of_experts(evidence, kept).sort(dim=1).values

    def blocks(self, evidence: Evidence, blocks: Blocks) -> torch.Tensor:
        """Return the pivots of long columns that fill the quota of every class."""
        return _block_pivots(evidence.weighted_gram(), blocks).sort().values

    def shared(self, evidence: Evidence) -> torch.Tensor:
        """Return the weighted Gram: columns of several layers, one below the other, have the sum of theirs."""
        return evidence.weighted_gram()

    def blocks_of_shared(self, total: torch.Tensor, count: int, kept: int) -> torch.Tensor:
        """Return the pivots of the long columns of all layers."""
        return _block_pivots(total, Blocks(count, 1, kept)).sort().values

    def cost(self, extent: Extent) -> Cost:
        """Return the cost of pivoted Cholesky of the Gram, or of pivots from a sketch or from groups."""
        size, square = extent.columns, extent.columns**2
        if extent.sketch_rows:
            matrices, factors = (2, 0) if extent.pivoting in ("cholesky", "qr") else (4, 2)
            numbers = matrices * extent.sketch_rows * size + square + factors * extent.kept * size
            operations = 2.0 * extent.sketch_rows * size * extent.kept
            return Cost(DOUBLE * numbers, ("--set sketch_size=",), sketch_pivots=extent.kept, operations=operations)
        if extent.pivoting in ("grouped", "tournament"):
            return Cost(DOUBLE * (2 * square + 4 * size * extent.kept), gram_pivots=extent.kept)
        pivots = DOUBLE * (square + extent.on_cuda * PIVOT_ROWS * size)
        if not extent.weighs_output:
            return Cost(pivots, gram_pivots=extent.kept)
        weighed = neuron_gram_bytes(size, extent.outputs)
        return Cost(pivots + weighed, ("--set curvature=none",), gram_pivots=extent.kept)


def pivots_of_experts(evidence: Sequence[Evidence], rank: int) -> torch.Tensor:
    """Return the neurons of every expert to keep first, int64 `(E, rank)`, the first first: pivots of their Grams."""
    gram, _ = evidence[0].neurons()
    weighted = torch.empty(len(evidence), *gram.shape, dtype=torch.float64, device=gram.device)
    for own, one in zip(weighted, evidence, strict=True):
        gram, weights = one.neurons()
        own.copy_(gram).mul_(weights).mul_(weights.unsqueeze(1))
    return cholesky_pivots_(weighted, rank=rank)


def group_order(evidence: Evidence, num_groups: int) -> torch.Tensor:
    """Return all KV groups, the first to keep first, int64 `(groups,)`: the first k are what `id` keeps of them."""
    return _block_pivots(evidence.weighted_gram(), Blocks(num_groups, 1, num_groups))


def _block_pivots(gram: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return the pivots of long columns that fill the quota of every class, the first first; `gram`: weighted."""
    return pivots_with_quota(block_gram(gram, blocks.count), blocks.class_of(gram.device), quota=blocks.quota)


def block_gram(gram: torch.Tensor, count: int) -> torch.Tensor:
    """Return the Gram `(count, count)` of equal parts of neighbouring columns as long columns, from `gram (n, n)`."""
    size = len(gram) // count
    return torch.einsum("idjd->ij", gram.view(count, size, count, size))
