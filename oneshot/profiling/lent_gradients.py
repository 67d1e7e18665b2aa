"""Gradients through keys and values that a layer lends to later ones, on their way back to it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from oneshot.machine import Machine
from oneshot.stream import LentKeys, Memory
from oneshot.text import Batch, num_rows


@dataclass(frozen=True)
class Beside:
    """State what some sequences of a batch read beside the stream, and the gradients at lent keys and values.

    Attributes:
        memory: of these sequences; a layer puts what it lends into it. borrowed: keys and values that layers read, in
            no graph yet, by the type of attention. sums: gradients at lent ones so far, of the same shapes.
    """

    memory: Memory
    borrowed: dict[str, tuple[torch.Tensor, torch.Tensor]]
    sums: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors at which gradients are asked for."""
        return [one for pair in self.borrowed.values() for one in pair]

    def lent(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what a layer has lent, in its graph, and the gradients behind it."""
        lent = self.memory.lent if isinstance(self.memory.lent, dict) else {}
        names = [name for name in lent if name not in self.borrowed]
        return [one for name in names for one in lent[name]], [one for name in names for one in self.sums[name]]

    def add_(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients at the `leaves`; None at those that the layer does not read."""
        sums = [one for name in self.borrowed for one in self.sums[name]]
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient


class LentGradients:
    """Sum the gradients at lent keys and values over the layers that borrow them, stored as these are.

    Args:
        memory: of the pass forward over the batches, whose keys and values stay; None for layers that read nothing
            beside the stream.
    """

    def __init__(self, memory: Memory | None, machine: Machine, batches: Sequence[Batch]) -> None:
        self._memory, self._sums = memory, LentKeys(num_rows(batches), machine)
        self._lent = memory.lent if memory is not None and isinstance(memory.lent, LentKeys) else None
        for batch in batches if self._lent is not None else ():
            self._enter(batch)
            for name in self._names:
                keys, values = self._read(self._lent)[name]
                self._sums[name] = torch.zeros_like(keys), torch.zeros_like(values)

    def parts(self, batch: Batch, together: int, *, borrows: bool) -> Iterator[Beside | None]:
        """Yield what each so many sequences of a batch read beside the stream; None if layers read nothing.

        Args:
            borrows: whether the layer reads keys and values of earlier ones; then their sums are stored at the end.
        """
        memory = self._memory
        self._enter(batch)
        lent, sums = self._read(self._lent), self._read(self._sums)
        for first in range(0, len(batch.token_ids), together):
            if memory is None:
                yield None
                continue
            some = slice(first, first + together)
            borrowed = {name: (keys[some], values[some]) for name, (keys, values) in lent.items()} if borrows else {}
            own = replace(memory, lent=dict(borrowed), places=None if memory.places is None else memory.places[some])
            yield Beside(own, borrowed, {name: (keys[some], values[some]) for name, (keys, values) in sums.items()})
        for name, pair in sums.items() if borrows else ():
            self._sums[name] = pair

    def close(self) -> None:
        """Release keys, values and gradients."""
        self._sums.close()
        if self._memory is not None:
            self._memory.close()

    @property
    def _names(self) -> list[str]:
        return [] if self._lent is None else self._lent.names

    def _enter(self, batch: Batch) -> None:
        self._sums.enter(batch.rows, len(batch.token_ids))
        if self._memory is not None:
            self._memory.enter(batch)

    def _read(self, store: LentKeys | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {} if store is None else {name: store[name] for name in self._names}
