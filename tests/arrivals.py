"""The tokens that arrive at each expert of a mixture, expert by expert."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oneshot.stream import Routing


@dataclass(frozen=True)
class Arrived:
    """The tokens `(r,)` of one expert, their gates `(r,)`, and what its down projection reads, `(r, m)`."""

    expert: int
    tokens: torch.Tensor
    gates: torch.Tensor
    neurons: torch.Tensor


def by_expert(routing: Routing) -> Iterator[Arrived]:
    """Yield what arrives at each expert that gets any token, without what blocks are padded with."""
    counts = routing.counts.tolist()
    for block in routing.arrivals():
        for place, expert in enumerate(block.experts):
            rows = counts[expert]
            if rows:
                parts = block.tokens, block.gates, block.neurons
                yield Arrived(expert, *(part[place, :rows] for part in parts))
