"""The layers of a result of `--form gguf`, read one at a time, and how large their inputs are on a text."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from oneshot.checkpoint import GgufCheckpoint, copy_modules
from oneshot.checkpoint.safe_files import read_config
from oneshot.compression.overflow import naming_the_layer, refuse_overflow
from oneshot.export.companions import empty_model
from oneshot.export.gguf_result import RestoredModel
from oneshot.machine import Machine
from oneshot.machine.transfer import uploaded
from oneshot.stream import ActivationStore, InputSquares, OutputHead
from oneshot.tensors import Tensors
from oneshot.text import Batch, Text

Advance = Callable[[float], None]  # receives the tokens that passed a layer
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class ResultLayer:
    """A layer of a result: its module, its tensors on the host, and its pass of states `(sequences, length, D)`."""

    module: nn.Module
    tensors: Tensors
    run: Callable[[torch.Tensor], torch.Tensor]


class ResultModel:
    """A result of `--form gguf` on its way through a text, layer by layer; parts of it are in memory one at a time.

    Args:
        path: of the file, with its config.json beside it.

    Attributes:
        source: the tensors of the file, by the names of the per-layer form. num_layers: its layers.
        embedding_scale: what the first layer reads of the embedding's rows. hidden_size: width of the states.
    """

    source: "RestoredModel | GgufCheckpoint"
    embedding_scale = 1.0

    def __init__(self, path: Path, text: Text, machine: Machine) -> None:
        self.source, self.machine = RestoredModel(path), machine
        self.config = read_config(path.parent)
        self._whole = empty_model(self.config)
        self.batches, self.num_layers = text.batches(machine.batch_size), len(self._whole.model.layers)
        self.num_tokens, base = text.num_tokens, self._whole.model
        self.hidden_size = base.config.hidden_size
        with machine.device:
            positions = torch.arange(text.longest).unsqueeze(0)
            example = torch.zeros(1, text.longest, self.hidden_size, dtype=machine.dtype)
            self._turned = type(base.rotary_emb)(base.rotary_emb.config)(example, positions)

    @property
    def has_head(self) -> bool:
        """Return whether the output head is a tensor of its own."""
        return f"{HEAD}.weight" in self.source.shapes

    def store(self) -> ActivationStore:
        """Return a place for states of the text."""
        return ActivationStore(self.num_tokens, self.hidden_size, self.machine)

    def embedded(self, table: torch.Tensor | None = None) -> ActivationStore:
        """Return the states before the first layer. `table`: the embedding `(N, D)`; None: the file's."""
        weight = self.table(EMBEDDING) if table is None else table
        store = self.store()
        for batch in self.batches:
            store.write(batch.rows, self._embed(weight, batch))
        return store

    def _embed(self, weight: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows = nn.functional.embedding(batch.token_ids, weight)
        return uploaded(rows, self.machine.device).to(self.machine.dtype)

    def table(self, name: str) -> torch.Tensor:
        """Return the embedding or the output head `(N, D)` in float32."""
        [weight] = self.source.read([f"{name}.weight"]).values()
        return weight

    def layer(self, number: int) -> ResultLayer:
        """Return a layer on the compute device."""
        empty = self._whole.model.layers[number]
        tensors = self._read(empty, f"model.layers.{number}")
        module = self._with(empty, tensors)
        return ResultLayer(module, tensors, partial(module, position_embeddings=self._turned, attention_mask=None))

    def output_head(self) -> OutputHead:
        """Return the output head with the final norm, on the compute device in the compute dtype."""
        norm = self._with(self._whole.model.norm, self._read(self._whole.model.norm, "model.norm"))
        weight = self.table(HEAD if self.has_head else EMBEDDING)
        return OutputHead(norm, uploaded(weight, self.machine.device).to(self.machine.dtype))

    def _read(self, module: nn.Module, name: str) -> Tensors:
        read = self.source.read(f"{name}.{own}" for own in module.state_dict())
        return {stored.removeprefix(f"{name}."): tensor for stored, tensor in read.items()}

    def _with(self, empty: nn.Module, tensors: Tensors) -> nn.Module:
        """Return the module with these tensors on the compute device in the compute dtype."""
        module: nn.Module = copy_modules(empty)
        on_device = {name: uploaded(one, self.machine.device) for name, one in tensors.items()}
        dtype = self.machine.dtype
        module.load_state_dict({name: one.to(dtype) for name, one in on_device.items()}, assign=True)
        return module.requires_grad_(False).eval()


def result_importance(model: ResultModel, advance: Advance) -> InputSquares:
    """Return the sums of squares of what the linears of a result read, by the names of the per-layer form.

    Raises `CheckpointError` if activations are not finite; it names the layer.
    """
    squares, store, size = InputSquares(), model.embedded(), model.config["hidden_size"]
    for number in range(model.num_layers):
        layer = model.layer(number)
        found = InputSquares()
        with found.listening(layer.module):
            for batch in model.batches:
                store.write(batch.rows, layer.run(store.read_batch(batch)))
                advance(batch.token_ids.numel())
        if layer.module.mlp is None:  # the file has one of a single neuron, whose tensors are zeros
            for linear, inputs in {"gate_proj": size, "up_proj": size, "down_proj": 1}.items():
                found.add_(f"mlp.{linear}", torch.zeros(inputs), torch.full((1,), model.num_tokens))
        with naming_the_layer(number, lambda layer=layer: layer.tensors):  # type: ignore[misc]
            refuse_overflow(*found.sums.values())
        for part, sums in found.sums.items():
            squares.add_(f"model.layers.{number}.{part}", sums.cpu(), found.counts[part].cpu())
    if model.has_head:
        norm = model.output_head().norm
        for batch in model.batches:
            squares.add_rows_(HEAD, norm(store.read(batch.rows)))
    store.close()
    return squares
