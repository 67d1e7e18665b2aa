"""Tokens in the order of the experts of a mixture that they go to, and the experts that are computed with at once."""

from dataclasses import dataclass
from itertools import accumulate

import torch

EXPERTS_TOGETHER = 8  # whose rows a device multiplies in one product; a host takes expert by expert
ROWS_MULTIPLE = 128  # of the rows of an expert on a device: a product of a new shape takes its host three times as long


@dataclass(frozen=True)
class Block:
    """Neighbouring experts whose pairs are computed with at once.

    Attributes:
        experts: their numbers. first: place of the first one's first pair in `Placement.pairs`. rows: pairs of each.
    """

    experts: range
    first: int
    rows: int

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers `(n, rows, …)` of its `n` experts, taken from the numbers of all pairs."""
        count = len(self.experts)
        return numbers[self.first : self.first + count * self.rows].unflatten(0, (count, self.rows))

    def within(self, group: range) -> "Block":
        """Return the experts of it that are in a group."""
        experts = range(max(self.experts.start, group.start), min(self.experts.stop, group.stop))
        return Block(experts, self.first + (experts.start - self.experts.start) * self.rows, self.rows)


@dataclass(frozen=True)
class Placement:
    """Hold the pairs of a token and one of its experts in the order of the experts, and what is computed at once.

    On a host, experts are taken one by one; on a device `EXPERTS_TOGETHER`, or fewer if their rows are more than all
    tokens, because its host takes as long to start an operation for one.

    Attributes:
        pairs: int64, places in the flattened `chosen (tokens, k)`, ascending for every expert; `tokens · k` where an
            expert of several has fewer than the longest. tokens: of the pairs; any where there is no pair.
        counts: int64 `(E,)`, the tokens of every expert.
        blocks: of all experts that get a token. is_padded: whether there are places without a pair.
    """

    pairs: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    blocks: tuple[Block, ...]
    is_padded: bool

    @staticmethod
    def of(chosen: torch.Tensor, num_experts: int) -> "Placement":
        """Place the experts `chosen (tokens, k)`; waits for a device once."""
        return Placement.together(chosen, num_experts) if chosen.is_cuda else Placement.alone(chosen, num_experts)

    @staticmethod
    def alone(chosen: torch.Tensor, num_experts: int) -> "Placement":
        """Place one expert after the other."""
        order, counts = _in_order(chosen, num_experts)
        sizes = counts.tolist()
        ends = accumulate(sizes)
        blocks = (
            Block(range(expert, expert + 1), end - size, size)
            for expert, (size, end) in enumerate(zip(sizes, ends, strict=True))
            if size
        )
        return Placement(order, order // chosen.shape[1], counts, tuple(blocks), is_padded=False)

    @staticmethod
    def together(chosen: torch.Tensor, num_experts: int) -> "Placement":
        """Place several experts at once, each with as many rows as the longest of `EXPERTS_TOGETHER` neighbours."""
        order, counts = _in_order(chosen, num_experts)
        sizes, most = counts.tolist(), padded_rows(len(chosen))
        blocks, rows, total = list[Block](), list[int](), 0
        for first in range(0, num_experts, EXPERTS_TOGETHER):
            of_block = sizes[first : first + EXPERTS_TOGETHER]
            longest, together = padded_rows(max(of_block)), EXPERTS_TOGETHER
            rows += [longest] * len(of_block)
            while together > 1 and together * longest > most:
                together //= 2
            for start in range(first, first + len(of_block), together):
                experts = range(start, min(start + together, first + len(of_block)))
                if longest:
                    blocks.append(Block(experts, total, longest))
                total += len(experts) * longest
        lengths = torch.tensor(rows, device=chosen.device)
        expert = torch.arange(num_experts, device=chosen.device).repeat_interleave(lengths, output_size=total)
        rank = torch.arange(total, device=chosen.device) - (lengths.cumsum(0) - lengths)[expert]
        place = (rank + (counts.cumsum(0) - counts)[expert]).clamp_(max=len(order) - 1)
        pairs = order[place].where(rank < counts[expert], len(order))
        tokens = (pairs // chosen.shape[1]).clamp_(max=len(chosen) - 1)
        return Placement(pairs, tokens, counts, tuple(blocks), is_padded=True)


def padded_rows(count: int) -> int:
    """Return how many rows a device computes with for an expert that `count` tokens come to."""
    return -(-count // ROWS_MULTIPLE) * ROWS_MULTIPLE


def _in_order(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs in the order of the experts, and the tokens of every expert `(E,)`, both int64."""
    pairs = chosen.flatten()
    return pairs.argsort(stable=True), pairs.bincount(minlength=num_experts)
