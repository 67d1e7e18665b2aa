"""Sums of squares of what the linears of a layer read: the diagonals of their Grams."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from oneshot.architecture import Experts, Stack
from oneshot.stream.routing import Routing


class InputSquares:
    """Sum the squares of what every linear of a layer reads, over the batches that pass while it listens.

    Attributes:
        sums: float64 by the linear's name, `(n,)` for its n inputs. The two linears of experts have a row for every
            expert, `(E, n)`, over the tokens that the router sends there. counts: tokens in each sum, float64 `(1,)` or
            `(E,)`.

    A batch is summed in float32 and batches in float64, so sums do not depend on their order (`linalg/sums`).
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}

    @contextmanager
    def listening(self, module: nn.Module, stack: Stack | None = None) -> Iterator[None]:
        """Listen to the linears of a layer's module inside the block; to experts if its `stack` describes any.

        A linear that the checkpoint stores in a larger one counts as this one, which reads the same.
        """
        fused = {} if stack is None else stack.fused
        stored = {part: whole for whole, parts in fused.items() for part in parts}
        repeated = {part for parts in fused.values() for part in parts[1:]}
        experts = None if stack is None else stack.experts
        with ExitStack() as hooks:
            for name, part in module.named_modules():
                if name not in repeated and _multiplies(part):
                    listener = self._listener(stored.get(name, name))
                    hooks.enter_context(part.register_forward_pre_hook(listener))
            if experts is not None:
                of_experts, whole = self._listener_of_experts(experts), module.get_submodule(experts.experts)
                hooks.enter_context(whole.register_forward_pre_hook(of_experts, with_kwargs=True))
            yield

    def add_(self, name: str, squares: torch.Tensor, counts: torch.Tensor) -> None:
        """Add a batch's sum of squares of a linear, and its tokens."""
        if name not in self.sums:
            self.sums[name] = torch.zeros_like(squares, dtype=torch.float64)
            self.counts[name] = torch.zeros_like(counts, dtype=torch.float64)
        self.sums[name] += squares
        self.counts[name] += counts

    def add_rows_(self, name: str, rows: torch.Tensor) -> None:
        """Add a batch `(…, n)` that a linear reads."""
        rows = rows.flatten(0, -2).float()
        self.add_(name, rows.square().sum(0), rows.new_full((1,), len(rows)))

    def _listener(self, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _, inputs: self.add_rows_(name, inputs[0])

    def _listener_of_experts(self, experts: Experts) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]:
        def listen(module: Any, unnamed: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            rows, chosen, gates = (*unnamed, *named.values())
            routing = Routing(rows, rows, chosen, gates.to(rows.dtype), rows, rows, module, experts.alternating)
            counts = routing.counts
            arrived = rows.new_zeros(len(rows), len(counts), dtype=torch.float32).scatter_(1, chosen, 1)
            self.add_(experts.gate_up, arrived.mT @ rows.float().square(), counts)
            width = module.down_proj.shape[1 if experts.alternating else 2]
            whole = rows.new_zeros(len(counts), width, dtype=torch.float32)
            for one in routing.arrivals():
                squares = one.neurons.float().square() * (one.pairs < chosen.numel()).unsqueeze(-1)
                whole[one.experts.start : one.experts.stop] = squares.sum(1)
            self.add_(experts.down, whole, counts)

        return listen


def _multiplies(module: nn.Module) -> bool:
    """Return whether a module multiplies its input by a matrix: a linear, or a router, but not a table."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)
