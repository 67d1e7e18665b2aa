"""The way of a batch through a mixture of experts, as the stock modules route it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Arrivals:
    """The tokens of a batch that arrive at one expert.

    Attributes:
        expert: its number. tokens: rows of the batch, ascending int64 `(r,)`. gates: the weights `(r,)` of its output.
        neurons: what its down projection reads, `(r, m)`. weights: further numbers `(r,)` of these tokens and this
            expert; None if none were given.
    """

    expert: int
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
        """Yield the tokens of every expert that gets any, in the order of the experts; `group`: of these alone.

        `weights`: numbers `(tokens, k)` of tokens and their experts. What can be is computed for all experts at once,
        because a device takes as long to start an operation for one.
        """
        order, sizes = self.chosen.flatten().argsort(stable=True), self.counts.tolist()
        tokens, gates = order // self.chosen.shape[1], self.gates.flatten()[order]
        parts = [tokens.split(sizes), gates.split(sizes)]
        if weights is not None:
            parts.append(weights.flatten()[order].split(sizes))
        for expert, (own, *numbers) in enumerate(zip(*parts, strict=True)):
            if len(own) and (group is None or expert in group):
                neurons = self.neurons(expert, self.inputs[own])
                yield Arrivals(expert, own, numbers[0], neurons, *numbers[1:])

    def summed(self) -> torch.Tensor:
        """Return `mixed` by our own way through the experts, one after the other."""
        total = torch.zeros_like(self.mixed)
        for one in self.arrivals():
            total[one.tokens] += one.gates.unsqueeze(1) * self._written(one.expert, one.neurons)
        return total

    def output(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Return what an expert writes for these rows of the inputs, without its gate, `(rows, D)`."""
        return self._written(expert, self.neurons(expert, rows))

    def _written(self, expert: int, neurons: torch.Tensor) -> torch.Tensor:
        """Return what an expert writes for its neurons `(rows, m)`."""
        down = self.experts.down_proj[expert]
        written: torch.Tensor = (
            neurons @ down + self.experts.down_proj_bias[expert] if self.alternating else neurons @ down.T
        )
        return written

    def neurons(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Return what the down projection of an expert reads for these rows of the inputs, `(rows, m)`."""
        if self.alternating:
            both = rows @ self.experts.gate_up_proj[expert] + self.experts.gate_up_proj_bias[expert]
            clamped: torch.Tensor = self.experts._apply_gate(both)
            return clamped
        gate, up = functional.linear(rows, self.experts.gate_up_proj[expert]).chunk(2, dim=-1)
        neurons: torch.Tensor = self.experts.act_fn(gate).mul_(up)
        return neurons


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
