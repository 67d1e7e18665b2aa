"""A result of `--form gguf` in the family's own architecture, read layer by layer as the stock class computes it."""

from pathlib import Path

import torch

from oneshot.checkpoint import GgufCheckpoint, identify
from oneshot.checkpoint.safe_files import read_config
from oneshot.export.result_model import ResultLayer, ResultModel
from oneshot.families import COMPRESSED_MODEL_TYPE
from oneshot.machine import Machine
from oneshot.stream import LayerBuilder, OutputHead
from oneshot.text import Batch, Text


def open_result(path: Path, text: Text, machine: Machine) -> ResultModel:
    """Open the GGUF file of a result, with its config.json beside it.

    Raises `CheckpointError` if it does not have the tensors that it should have.
    """
    own_sizes = read_config(path.parent).get("model_type") == COMPRESSED_MODEL_TYPE
    return (ResultModel if own_sizes else StockResult)(path, text, machine)


class StockResult(ResultModel):
    """A result whose layers the stock class computes, with what the stock model gives them (`stream/template`)."""

    def __init__(self, path: Path, text: Text, machine: Machine) -> None:
        self.source, self.machine = GgufCheckpoint(path), machine
        self._model = identify(self.source)
        self.config = self.source.config
        self.batches, self.num_tokens = text.batches(machine.batch_size), text.num_tokens
        self.num_layers = self._model.shape.num_hidden_layers
        self.embedding_scale = self._model.family.stack.embedding_scale
        self._builder = LayerBuilder(self._model, machine, text.longest)
        self.hidden_size = self._model.shape.hidden_size

    def _embed(self, weight: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._builder.embed(weight, batch)

    def layer(self, number: int) -> ResultLayer:
        """Return a layer on the compute device."""
        family, shape = self._model.family, self._model.shape
        names = {family.layer_prefix(number) + name: name for name in family.stored_tensors(shape, number)}
        read = self.source.read(names)  # not by `read_layer`, whose tensors of inference mode no graph takes
        tensors = {names[name]: tensor for name, tensor in read.items()}
        layer = self._builder.layer(number, tensors)
        return ResultLayer(layer.module, tensors, layer.run_all)

    def output_head(self) -> OutputHead:
        """Return the output head with the final norm, on the compute device in the compute dtype."""
        return self._builder.output_head()
