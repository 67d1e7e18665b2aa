"""Inputs of layers beside the stream, for the present batch: rows of a table for its tokens, and lent keys and values.

The rows come from the stock model's own table and projection. The table of all layers is a large part of a small model:
only rows of tokens that occur are read, layer by layer. Keys and values are stored between layers as hidden states are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from oneshot.checkpoint import Model, make_buffers, sample_model
from oneshot.machine import Machine
from oneshot.machine.transfer import uploaded
from oneshot.stream.store import ActivationStore
from oneshot.text import Batch, num_rows

TOKENS_TOGETHER = 2048  # distinct tokens whose rows are read at once


class TokenInputs:
    """Hold what each distinct token reads in one layer, of a model whose stack has `token_inputs`.

    It does not depend on the stream: the embedding stays as it is in the compressed model.

    Args:
        token_ids: all tokens that will be asked for, int64 of any shape.
    """

    def __init__(self, model: Model, machine: Machine, token_ids: torch.Tensor) -> None:
        inputs, stack = model.family.stack.token_inputs, model.family.stack
        assert inputs is not None
        self._model, self._machine, self._inputs = model, machine, inputs
        self._ids = token_ids.unique()
        sample = sample_model(model.checkpoint.config, model.family, machine.dtype)
        make_buffers(sample, machine.device)
        self._stock: Any = sample.get_submodule(stack.base)
        self._stock.config.num_hidden_layers = 1  # of a copy: the table has the columns of one layer at a time
        self._layer: tuple[int, torch.Tensor] | None = None

    def places(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `of_layer` for tokens, int64 of the same shape, on the compute device."""
        return uploaded(torch.searchsorted(self._ids, token_ids), self._machine.device)

    def of_layer(self, number: int) -> torch.Tensor:
        """Return what the distinct tokens read in a layer, `(tokens, width)`, in the compute dtype and device."""
        if self._layer is None or self._layer[0] != number:
            self._layer = None
            self._layer = number, torch.cat([self._read(ids, number) for ids in self._ids.split(TOKENS_TOGETHER)])
        return self._layer[1]

    def _read(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        inputs, checkpoint, stack = self._inputs, self._model.checkpoint, self._model.family.stack
        columns, (table, projection, norm) = inputs.columns(number), stack.token_tensors
        self._place(self._stock.embed_tokens, checkpoint.read_some(stack.embedding, ids))
        self._place(self._stock.get_submodule(inputs.table), checkpoint.read_some(table, ids, columns))
        self._place(self._stock.get_submodule(inputs.projection), checkpoint.read_rows(projection, columns))
        self._place(self._stock.get_submodule(inputs.norm), checkpoint.read_one(norm))
        rows = torch.arange(len(ids), device=self._machine.device).unsqueeze(0)
        embedded = self._stock.embed_tokens(rows)
        read = self._stock.project_per_layer_inputs(embedded, self._stock.get_per_layer_inputs(rows, embedded))
        found: torch.Tensor = read.view(len(ids), inputs.width)
        return found

    def _place(self, module: Any, weight: torch.Tensor) -> None:
        placed = uploaded(weight, self._machine.device).to(module.weight.dtype)
        module.weight = nn.Parameter(placed, requires_grad=False)


KeysValues = tuple[torch.Tensor, torch.Tensor]


class LentKeys:
    """Keys and values of one stream, by the type of their attention, for the present batch.

    The stock attention writes and reads it as a dictionary. Keys and values are `(sequences, groups, length, size)`.
    """

    def __init__(self, num_tokens: int, machine: Machine) -> None:
        self._num_tokens, self._machine = num_tokens, machine
        self._stores: dict[str, tuple[ActivationStore, int]] = {}  # with the KV heads
        self._rows, self._sequences = slice(0, 0), 0

    def enter(self, rows: slice, sequences: int) -> None:
        """Go on to another batch, which has these rows of the stream's tokens."""
        self._rows, self._sequences = rows, sequences

    @property
    def names(self) -> list[str]:
        """Return the types of attention that have lent keys and values."""
        return list(self._stores)

    def __setitem__(self, name: str, lent: KeysValues) -> None:
        by_token = torch.cat([one.transpose(1, 2).flatten(2) for one in lent], -1)
        if name not in self._stores:
            store = ActivationStore(self._num_tokens, by_token.shape[-1], self._machine)
            self._stores[name] = store, lent[0].shape[1]
        self._stores[name][0].write(self._rows, by_token)

    def __getitem__(self, name: str) -> KeysValues:
        store, groups = self._stores[name]
        both = store.read(self._rows).unflatten(0, (self._sequences, -1)).unflatten(-1, (2, groups, -1))
        keys, values = both.transpose(1, 3).unbind(2)
        return keys, values

    def close(self) -> None:
        """Release the memory or the files."""
        for store, _ in self._stores.values():
            store.close()


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
