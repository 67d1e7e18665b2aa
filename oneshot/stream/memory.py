"""Inputs of layers beside the stream, for the present batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from oneshot.checkpoint import Model
from oneshot.machine import Machine
from oneshot.stream.lent_keys import KeysValues, LentKeys
from oneshot.stream.token_inputs import TokenInputs
from oneshot.text import Batch, num_rows


@dataclass
class Memory:
    """Hold the inputs of layers beside the stream, for the present batch.

    Attributes:
        states: the encoder's output, which cross-attention reads, `(sequences, source length, D)`; None without one.
        lent: keys and values of earlier layers; None without layers that borrow them.
        tokens, places: what tokens read in each layer, and its rows for the tokens of the batch, int64 `(sequences,
            length)`; None without.
    """

    states: torch.Tensor | None = None
    lent: LentKeys | dict[str, KeysValues] | None = None
    tokens: TokenInputs | None = None
    places: torch.Tensor | None = None

    def enter(self, batch: Batch) -> None:
        """Go on to another batch of the stream."""
        if isinstance(self.lent, LentKeys):
            self.lent.enter(batch.rows, len(batch.token_ids))
        if self.tokens is not None:
            self.places = self.tokens.places(batch.token_ids)

    def close(self) -> None:
        """Release the keys and values."""
        if isinstance(self.lent, LentKeys):
            self.lent.close()

    def copied(self) -> "Memory":
        """Return the memory of the same single batch, whose layers lend keys and values of their own from now on."""
        return replace(self, lent=dict(self.lent) if isinstance(self.lent, dict) else None)


def memory_of(
    model: Model,
    machine: Machine,
    batches: Sequence[Batch],
    *,
    further: Sequence[Batch] = (),
    beside: Memory | None = None,
) -> Memory | None:
    """Return what layers of one stream read beside it; None if they read nothing.

    Args:
        batches: of the stream, one after the other; a worker may have none. further: of others that also pass its
            layers. beside: of a stream with all of these tokens.
    """
    lends, inputs = bool(model.family.lenders), model.family.stack.token_inputs
    if inputs is None and not lends:
        return None
    tokens = None if beside is None else beside.tokens
    if tokens is None and inputs is not None:
        tokens = TokenInputs(model, machine, torch.cat([batch.token_ids.flatten() for batch in (*batches, *further)]))
    memory = Memory(lent=LentKeys(num_rows(batches), machine) if lends else None, tokens=tokens)
    if batches:
        memory.enter(batches[0])
    return memory


def memory_of_one(batch: Batch, beside: Memory | None) -> Memory | None:
    """Return what layers read of a single batch, which stays; `beside`: of a stream with all of its tokens."""
    if beside is None:
        return None
    memory = Memory(lent=None if beside.lent is None else {}, tokens=beside.tokens)
    memory.enter(batch)
    return memory
