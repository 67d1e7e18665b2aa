"""The way of a batch through a mixture of experts, as the stock modules route it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional

EXPERTS_TOGETHER = 8  # whose rows a device multiplies in one product; a host takes expert by expert
ROWS_MULTIPLE = 128  # of the rows of an expert on a device: a product of a new shape takes its host three times as long


@dataclass(frozen=True)
class Block:
    """What comes to `n` neighbouring experts: pairs of a token and one of its experts.

    Attributes:
        experts: the numbers of these. pairs: int64 `(n, r)`, ascending places in the flattened `chosen` of `(tokens,
            k)`; `tokens · k` where an expert of several has fewer than the longest.
        is_padded: whether there are such.
    """

    experts: range
    pairs: torch.Tensor
    is_padded: bool


def padded_rows(count: int) -> int:
    """Return how many rows a device computes with for an expert that `count` tokens come to."""
    return -(-count // ROWS_MULTIPLE) * ROWS_MULTIPLE


def blocks(chosen: torch.Tensor, num_experts: int) -> Iterator[Block]:
    """Yield what comes to the experts `chosen (tokens, k)`, in their order; none without a token.

    On a host, experts come one by one; on a device several at once (`padded_blocks`), because its host takes as long to
    start an operation for one.
    """
    if chosen.is_cuda:
        yield from padded_blocks(chosen, num_experts)
        return
    sizes = chosen.flatten().bincount(minlength=num_experts).tolist()
    for expert, own in enumerate(chosen.flatten().argsort(stable=True).split(sizes)):
        if len(own):
            yield Block(range(expert, expert + 1), own.unsqueeze(0), is_padded=False)


def padded_blocks(chosen: torch.Tensor, num_experts: int) -> Iterator[Block]:
    """Yield what comes to `EXPERTS_TOGETHER` experts at once, or to fewer if their rows are more than all tokens."""
    order, counts = chosen.flatten().argsort(stable=True), chosen.flatten().bincount(minlength=num_experts)
    sizes, ends = counts.tolist(), counts.cumsum(0)
    places, most = torch.arange(padded_rows(max(sizes)), device=order.device), padded_rows(len(chosen))
    for first in range(0, num_experts, EXPERTS_TOGETHER):
        rows = padded_rows(max(sizes[first : first + EXPERTS_TOGETHER]))
        together = EXPERTS_TOGETHER
        while together > 1 and together * rows > most:
            together //= 2
        for start in range(first, min(first + EXPERTS_TOGETHER, num_experts), together):
            experts = range(start, min(start + together, num_experts))
            if any(sizes[start : experts.stop]):
                own_ends = ends[start : experts.stop, None]
                own = places[:rows] + (own_ends - counts[start : experts.stop, None])
                pairs = order[own.clamp(max=len(order) - 1)].where(own < own_ends, len(order))
                yield Block(experts, pairs, is_padded=True)


@dataclass(frozen=True)
class Arrivals:
    """The tokens of a batch that arrive at `n` neighbouring experts.

    Where an expert of several has fewer tokens than the longest, tokens are any, and the other numbers are zero.

    Attributes:
        experts: their numbers. pairs: as in `Block`. tokens: rows of the batch, int64 `(n, r)`. gates: the weights
            `(n, r)` of their outputs.
        neurons: what the down projections read, `(n, r, m)`. weights: further numbers `(n, r)` of these tokens and
            experts; None if none were given.
    """

    experts: range
    pairs: torch.Tensor
    tokens: torch.Tensor
    gates: torch.Tensor
    neurons: torch.Tensor
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """The routing of the tokens of a batch.

    Attributes:
        inputs: what router and experts read, `(tokens, D)`. logits: of the router, `(tokens, E)`.
        chosen: int64 `(tokens, k)`, the experts of every token. gates: `(tokens, k)`, the weights of their outputs.
        mixed: the weighted sum of their outputs, `(tokens, D)`. written: what the whole mixture writes, with a shared
            expert. experts: the stock module.
        alternating: as in `families.Experts`.
    """

    inputs: torch.Tensor
    logits: torch.Tensor
    chosen: torch.Tensor
    gates: torch.Tensor
    mixed: torch.Tensor
    written: torch.Tensor
    experts: Any
    alternating: bool = False

    @property
    def num_experts(self) -> int:
        """Return the number of experts that tokens can go to."""
        return len(self.experts.down_proj)

    @cached_property
    def counts(self) -> torch.Tensor:
        """Return the tokens of every expert, int64 `(E,)`."""
        return self.chosen.flatten().bincount(minlength=self.num_experts)

    def arrivals(self, group: range | None = None, weights: torch.Tensor | None = None) -> Iterator[Arrivals]:
        """Yield the tokens of every expert that gets any, in the order of the experts, by `blocks`.

        Args:
            group: of these alone. weights: numbers `(tokens, k)` of tokens and their experts.
        """
        group = range(self.num_experts) if group is None else group
        gates, further = _with_zero(self.gates), None if weights is None else _with_zero(weights)
        for block in blocks(self.chosen, self.num_experts):
            experts = range(max(block.experts.start, group.start), min(block.experts.stop, group.stop))
            if experts:
                pairs = block.pairs[experts.start - block.experts.start :][: len(experts)]
                tokens = tokens_of(pairs, self.chosen)
                inputs = self.inputs[tokens]
                if block.is_padded:
                    inputs.masked_fill_((pairs == self.chosen.numel()).unsqueeze(-1), 0)
                numbers = gates[pairs], self.neurons(experts, inputs), None if further is None else further[pairs]
                yield Arrivals(experts, pairs, tokens, *numbers)

    def summed(self) -> torch.Tensor:
        """Return `mixed` by our own way through the experts, one after the other."""
        written = self.mixed.new_zeros(self.chosen.numel() + 1, self.mixed.shape[1])  # and one for padded pairs
        for one in self.arrivals():
            written[one.pairs] = one.gates.unsqueeze(-1) * self._written(one.experts, one.neurons)
        return written[:-1].view(*self.chosen.shape, -1).sum(1)

    def output(self, experts: range, rows: torch.Tensor) -> torch.Tensor:
        """Return what experts write for these rows `(n, r, D)` of the inputs, without their gates."""
        return self._written(experts, self.neurons(experts, rows))

    def _written(self, experts: range, neurons: torch.Tensor) -> torch.Tensor:
        """Return what experts write for their neurons `(n, r, m)`."""
        own = slice(experts.start, experts.stop)
        down = self.experts.down_proj[own]
        if self.alternating:
            return _products(neurons, down) + self.experts.down_proj_bias[own].unsqueeze(1)
        return _products(neurons, down.mT)

    def neurons(self, experts: range, rows: torch.Tensor) -> torch.Tensor:
        """Return what the down projections of experts read for these rows `(n, r, D)` of the inputs, `(n, r, m)`."""
        own = slice(experts.start, experts.stop)
        gate_up = self.experts.gate_up_proj[own]
        if self.alternating:
            both = _products(rows, gate_up) + self.experts.gate_up_proj_bias[own].unsqueeze(1)
            clamped: torch.Tensor = self.experts._apply_gate(both)
            return clamped
        gate, up = _products(rows, gate_up.mT).chunk(2, dim=-1)
        neurons: torch.Tensor = self.experts.act_fn(gate).mul_(up)
        return neurons


def tokens_of(pairs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the tokens of the pairs of a block; the last one where it is padded."""
    return (pairs // chosen.shape[1]).clamp_(max=len(chosen) - 1)


def _with_zero(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of pairs, and zero for what a block is padded with."""
    return functional.pad(numbers.flatten(), (0, 1))


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the products of `left (n, r, a)` and `right (n, a, b)`; for one of each as for two matrices."""
    return left @ right if len(left) > 1 else (left[0] @ right[0]).unsqueeze(0)


def written_by(block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return what a stock block writes for a batch `(…, D)`."""
    return written_part(block(inputs))


def written_part(output: Any) -> torch.Tensor:
    """Return what a stock module writes; some blocks also return their gates."""
    written: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return written


def route(
    block: Callable[[torch.Tensor], torch.Tensor],
    router: nn.Module,
    experts: nn.Module,
    x: torch.Tensor,
    *,
    alternating: bool = False,
) -> Routing:
    """Let stock modules route a batch `(…, D)`: the experts are told which tokens they get, and with which weights.

    Args:
        block: what the whole mixture writes. router: the module whose output, or its first part, are logits.
    """
    logits: list[torch.Tensor] = []
    told: list[tuple[torch.Tensor, ...]] = []

    def listen(_: nn.Module, unnamed: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor) -> None:
        told.append((*unnamed, *named.values(), output))

    handles = [
        experts.register_forward_hook(listen, with_kwargs=True),
        router.register_forward_hook(lambda _, __, output: logits.append(written_part(output))),
    ]
    try:
        written = block(x)
    finally:
        for handle in handles:
            handle.remove()
    [(rows, chosen, gates, mixed)] = told
    return Routing(rows, logits[0], chosen, gates.to(rows.dtype), mixed, written.flatten(0, -2), experts, alternating)
