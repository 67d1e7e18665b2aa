"""The hidden states that walk through the model, and the layers that move them.

The *compressed* stream is the one that every layer that is compressed will really see; the *dense* one, of the
untouched model, is there only where the correction's target comes from it.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from oneshot.activations import ActivationStore
from oneshot.arch.base import DOWN_PROJ, K_PROJ, O_PROJ
from oneshot.config import CompressionConfig
from oneshot.errors import CalibrationError
from oneshot.hidden import StreamSubspaces
from oneshot.output_head import OutputHead
from oneshot.records import CalibrationSet, ModelShape
from oneshot.source import SourceModel
from oneshot.stream import LayerStream, StreamLayer, embed_text
from oneshot.workers import ALONE, Workers

Tensors = dict[str, torch.Tensor]


class Streams:
    """Both streams, batch by batch. `embed` comes first; without it there is no text, and nothing to read.

    Of several workers each has its own part of the sequences; `num_tokens` are those of all.

    Args:
        two: whether the dense stream is there, too.
        tier: where activations live, as in `ActivationStore`; on disk in `scratch`.
        subspaces: where the compressed stream is kept; None at full width.
    """

    def __init__(
        self,
        config: CompressionConfig,
        source: SourceModel,
        subspaces: StreamSubspaces | None,
        *,
        two: bool,
        device: torch.device,
        dtype: torch.dtype,
        scratch: Path,
        tier: str,
        workers: Workers = ALONE,
    ) -> None:
        self.workers = workers
        self._config, self._source, self._subspaces = config, source, subspaces
        self.dtype = dtype
        self._two, self._device, self._scratch, self._tier = two, device, scratch, tier
        self._builders: dict[ModelShape, LayerStream] = {}
        self._stores: list[ActivationStore] = []

    def embed(self, calibration: CalibrationSet, compressed: torch.Tensor | None = None) -> None:
        """Fill the activation stores with the embeddings of this worker's part of the calibration text.

        `compressed`: the embedding `(N, D)` of the compressed stream, where it is not the dense model's.

        Raises `CalibrationError` where there are fewer sequences than workers.
        """
        num_sequences, self._sequence_length = calibration.token_ids.shape
        self.num_tokens = calibration.token_ids.numel()
        part = self.workers.part(num_sequences)
        if num_sequences < self.workers.size:
            raise CalibrationError(
                f"{num_sequences} sequences are too few for {self.workers.size} processes; give more --num-sequences."
            )
        self.first_row = part.start * self._sequence_length
        dense = self._source.checkpoint.read_one(self._source.architecture.embedding)
        first = dense if compressed is None else compressed
        self._batches, self._stores = embed_text(
            self._builder(self._source.shape),
            [first, dense] if self._two else [first],
            calibration.token_ids[part],
            self._source.read_positions(),
            batch_size=self._config.batch_size,
            tier=self._tier,
            folder=self._scratch,
        )
        if self._subspaces is not None:
            for batch, x, _ in self.read():
                self.write(batch, self._subspaces.inside(x, 0))

    def embedded(self, token_ids: torch.Tensor, embedding: torch.Tensor | None = None) -> torch.Tensor:
        """Embeddings of further sequences `(sequences, length, D)` of the same length, on the device.

        `embedding (N, D)`: another one than the dense model's.
        """
        if embedding is None:
            embedding = self._source.checkpoint.read_one(self._source.architecture.embedding)
        return self._builder(self._source.shape).embed(embedding, token_ids, self._source.read_positions())

    def output_head(self) -> OutputHead:
        """What follows the last layer of the dense model."""
        checkpoint, architecture = self._source.checkpoint, self._source.architecture
        norm = checkpoint.read_prefix(f"{architecture.final_norm}.")
        name = architecture.embedding if self._source.shape.tied else architecture.output_head
        return self._builder(self._source.shape).output_head(norm, checkpoint.read_one(name))

    @property
    def has_text(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._stores)

    def read(self, every: int = 1) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """The batches of both streams: the compressed one's states, and the dense one's where it is there.

        `every`: of so many batches the first alone.
        """
        for batch in self._batches[::every]:
            yield batch, *self._read(batch)

    def share_read(self, every: int) -> float:
        """The share of this worker's sequences that `read(every)` gives."""
        sizes = [batch.stop - batch.start for batch in self._batches]
        return sum(sizes[::every]) / sum(sizes)

    def read_last(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last batch of both streams."""
        return self._read(self._batches[-1])

    def write(self, batch: slice, values: torch.Tensor) -> None:
        """Move the compressed stream on."""
        self._stores[0].write(batch, values)

    def write_dense(self, batch: slice, values: torch.Tensor) -> None:
        """Move the dense stream on."""
        self._stores[1].write(batch, values)

    def layer(self, tensors: Tensors) -> StreamLayer:
        """The layer of the stock class with these weights, whose FFN and heads may be fewer than the model's."""
        shape = self._source.shape
        num_heads = tensors[f"{O_PROJ}.weight"].shape[1] // shape.head_dim
        groups = tensors[f"{K_PROJ}.weight"].shape[0] // shape.head_dim
        width = tensors[f"{DOWN_PROJ}.weight"].shape[1]
        held = replace(shape, intermediate_size=width, num_attention_heads=num_heads, num_key_value_heads=groups)
        return self._builder(held).layer(tensors)

    def close(self) -> None:
        """Release the activations."""
        for store in self._stores:
            store.close()

    def _read(self, batch: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._stores[0].read(batch), self._stores[1].read(batch) if self._two else None

    def _builder(self, shape: ModelShape) -> LayerStream:
        """The layer builder for a shape, made once."""
        if shape not in self._builders:
            architecture = self._source.architecture
            self._builders[shape] = LayerStream(
                architecture.resize_config(self._source.checkpoint.config, shape),
                architecture,
                sequence_length=self._sequence_length,
                device=self._device,
                dtype=self.dtype,
            )
        return self._builders[shape]
