"""The way of a batch through a mixture of experts, as the stock modules route it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from oneshot.stream.placement import Placement


@dataclass(frozen=True)
class Arrivals:
    """The tokens of a batch that arrive at `n` neighbouring experts.

    Where an expert of several has fewer tokens than the longest, tokens are any, and the other numbers are zero.

    Attributes:
        experts: their numbers. pairs: as in `Placement`. tokens: rows of the batch, int64 `(n, r)`. gates: the weights
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
    def placed(self) -> Placement:
        """Return the tokens in the order of the experts that they go to."""
        return Placement.of(self.chosen, self.num_experts)

    @property
    def counts(self) -> torch.Tensor:
        """Return the tokens of every expert, int64 `(E,)`."""
        return self.placed.counts

    def arrivals(self, group: range | None = None, weights: torch.Tensor | None = None) -> Iterator[Arrivals]:
        """Yield the tokens of every expert that gets any, in the order of the experts.

        Args:
            group: of these alone. weights: numbers `(tokens, k)` of tokens and their experts.
        """
        placed = self.placed
        gates = _with_zero(self.gates)[placed.pairs]
        further = None if weights is None else _with_zero(weights)[placed.pairs]
        nowhere = (placed.pairs == self.chosen.numel()).unsqueeze(1) if placed.is_padded else None
        for whole in placed.blocks:
            block = whole if group is None else whole.within(group)
            if not block.experts:
                continue
            inputs = self.inputs[block.of(placed.tokens)]
            if nowhere is not None:
                inputs.masked_fill_(block.of(nowhere), 0)
            yield Arrivals(
                block.experts,
                block.of(placed.pairs),
                block.of(placed.tokens),
                block.of(gates),
                self.neurons(block.experts, inputs),
                None if further is None else block.of(further),
            )

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


def _logits(output: Any, num_experts: int) -> torch.Tensor:
    """Return the numbers `(tokens, E)` of a router's output: releases of transformers return them at other places."""
    parts = output if isinstance(output, tuple) else (output,)
    found = (part for part in parts if part.is_floating_point() and part.shape[-1:] == (num_experts,))
    logits: torch.Tensor = next(found, parts[0])
    return logits


def route(
    block: Callable[[torch.Tensor], torch.Tensor],
    router: nn.Module,
    experts: Any,
    x: torch.Tensor,
    *,
    alternating: bool = False,
) -> Routing:
    """Let stock modules route a batch `(…, D)`: the experts are told which tokens they get, and with which weights.

    Args:
        block: what the whole mixture writes. router: the module whose output, or a part of it, are logits.
    """
    logits: list[torch.Tensor] = []
    told: list[tuple[torch.Tensor, ...]] = []

    def listen(_: nn.Module, unnamed: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor) -> None:
        told.append((*unnamed, *named.values(), output))

    def see(_: nn.Module, __: Any, output: Any) -> None:
        logits.append(_logits(output, len(experts.down_proj)))

    with experts.register_forward_hook(listen, with_kwargs=True), router.register_forward_hook(see):
        written = block(x)
    [(rows, chosen, gates, mixed)] = told
    return Routing(rows, logits[0], chosen, gates.to(rows.dtype), mixed, written.flatten(0, -2), experts, alternating)
