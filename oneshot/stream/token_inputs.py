"""Inputs of layers beside the stream, for every token of a text, by the stock model's own table and projection.

The table of all layers is a large part of a small model. Only the rows of tokens that occur are read, layer by layer.
"""

from typing import Any

import torch
from torch import nn

from oneshot.checkpoint import Model, make_buffers, sample_model
from oneshot.machine import Machine
from oneshot.machine.transfer import uploaded

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
