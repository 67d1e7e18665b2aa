"""The hidden states of the calibration text on their way through the model, layer by layer.

The *compressed* stream has the hidden states of the compressed model. The *dense* stream has those of the untouched
model; it exists only if a correction's target comes from it. Sublayers are deferred: a pass over the text that has to
read the states anyway also moves them through the sublayers that are waiting.

An encoder–decoder is passed stack by stack. Each stream's final states of the encoder stay, as the memory that the
decoder's cross-attention reads in that stream.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from oneshot.checkpoint import Model
from oneshot.errors import CalibrationError
from oneshot.machine import Machine
from oneshot.stream.layers import Layer, LayerBuilder, Memory
from oneshot.stream.store import ActivationStore
from oneshot.text import Batch, Text

Step = Callable[[torch.Tensor, bool], torch.Tensor]  # (a batch of states, whether it is the last) -> the next states
Tensors = dict[str, torch.Tensor]


class States:
    """Both streams of this worker's part of the text, batch by batch.

    The text is cut into batches before workers share it, so that batches are the same for any number of workers. Only
    if there are fewer batches than workers, batches are smaller.

    Args:
        two: whether the dense stream exists.
        compressed_embedding: the embedding `(N, D)` of the compressed stream; None for the dense model's.
        compressed_norm: makes the compressed stream's norm of the embeddings from the dense one; None for the same.

    Attributes:
        stack: the stack that the states are in. num_tokens: tokens of all workers.
        part: this worker's sequences of the whole text. first_batch, first_row: indices in it of the first batch and of
            the first token of the part.
        passes: how many passes over the text make a layer; `advance` receives tokens divided by it.

    Raises `CalibrationError` if there are fewer sequences than workers.
    """

    def __init__(
        self,
        model: Model,
        machine: Machine,
        text: Text,
        *,
        two: bool = False,
        compressed_embedding: torch.Tensor | None = None,
        compressed_norm: Callable[[Any], Any] | None = None,
        advance: Callable[[float], None] = lambda tokens: None,
    ) -> None:
        if text.num_sequences < machine.workers.size:
            raise CalibrationError(
                f"{text.num_sequences} sequences are too few for {machine.workers.size} processes; give more "
                "--num-sequences."
            )
        everywhere = text.batches(machine.batch_size)
        if len(everywhere) < machine.workers.size:
            everywhere = text.batches(0 if text.lengths is not None else text.num_sequences // machine.workers.size)
        share = machine.workers.part(len(everywhere))
        own, sizes = everywhere[share], [len(batch.token_ids) for batch in everywhere]
        self.part = slice(sum(sizes[: share.start]), sum(sizes[: share.stop]))
        self.machine, self.num_tokens = machine, text.num_tokens
        self.first_batch, self.first_row = share.start, own[0].rows.start
        self.builder = LayerBuilder(model, machine, text.longest)
        self.passes, self.advance = 1.0, advance
        self._model, self.stack = model, model.family.stack
        self._steps: list[Step] = []
        self._dense_steps: list[Step] = []
        embedding = model.read_embedding()
        first = embedding if compressed_embedding is None else compressed_embedding
        self._batches = [
            replace(batch, rows=slice(batch.rows.start - self.first_row, batch.rows.stop - self.first_row))
            for batch in own
        ]
        norm = self.builder.embedding_norm
        own_norm = norm if compressed_norm is None else compressed_norm(norm)
        self._stores = [self._embedded(first, own_norm)] + ([self._embedded(embedding, norm)] if two else [])
        self._memories: list[_StoredMemory] = []
        # every layer advances by all tokens, though an encoder passes only those of the source
        part_tokens = text.part(self.part).num_tokens
        self._progress = part_tokens / self._batches[-1].rows.stop

    @property
    def has_dense(self) -> bool:
        """Return whether the dense stream exists."""
        return len(self._stores) == 2

    def enter_decoder(self) -> None:
        """Go on to the decoder: the encoder's final norm gives its memory, and its states are the targets' embeddings.

        Nothing may be deferred.
        """
        assert not self._steps
        assert not self._dense_steps
        norm = self.builder.final_norm(self.stack)
        for store in self._stores:
            for batch in self._batches:
                states = store.read(batch.rows).unflatten(0, batch.token_ids.shape)
                store.write(batch.rows, norm(states))
            self._memories.append(_StoredMemory(store))
        self.stack = self._model.family.last_stack
        source_tokens = self._batches[-1].rows.stop
        self._batches = [batch.decoder for batch in self._batches if batch.decoder is not None]
        self._progress *= source_tokens / self._batches[-1].rows.stop
        embedding = self._model.read_embedding()
        self._stores = [self._embedded(embedding, None) for _ in self._stores]

    def layer(self, tensors: Tensors) -> Layer:
        """Return a layer of the present stack that the compressed stream passes."""
        return self.builder.layer(tensors, self.stack, self._memory(0))

    def dense_layer(self, tensors: Tensors) -> Layer:
        """Return a layer of the present stack that the dense stream passes, or the only stream if there is one."""
        return self.builder.layer(tensors, self.stack, self._memory(-1))

    def as_compressed(self, dense: Layer) -> Layer:
        """Return a layer with the same weights as a dense one that the compressed stream passes."""
        return dense.reading(self._memory(0))

    def defer(self, step: Step) -> None:
        """Let the next pass move the compressed stream through a step before it reads the states."""
        self._steps.append(step)

    def defer_dense(self, step: Step) -> None:
        """Let the next pass move the dense stream, if it exists, through a step."""
        if self.has_dense:
            self._dense_steps.append(step)

    def read(self, every: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield batches `(sequences, length, D)` of the compressed and the dense stream, after the deferred steps.

        `every`: yield only the first of so many batches of the whole text; nothing may be deferred then.
        """
        assert every == 1 or not (self._steps or self._dense_steps)
        steps, self._steps = self._steps, []
        dense_steps, self._dense_steps = self._dense_steps, []
        for batch in self._every(every):
            x = self._moved(0, batch, steps)
            yield x, self._moved(1, batch, dense_steps) if self.has_dense else None
            self.advance(self._progress * x.shape[0] * x.shape[1] / self.passes)

    def settle(self) -> None:
        """Move both streams through everything that is deferred."""
        for _ in self.read():
            pass

    def share_read(self, every: int) -> float:
        """Return the share of this worker's tokens that `read(every)` yields."""
        read = sum(batch.token_ids.numel() for batch in self._every(every))
        return read / sum(batch.token_ids.numel() for batch in self._batches)

    def read_last(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last batch of both streams; nothing may be deferred."""
        assert not (self._steps)
        assert not (self._dense_steps)
        return self._moved(0, self._batches[-1], []), (
            self._moved(1, self._batches[-1], []) if self.has_dense else None
        )

    def sums_of_embeddings(self, embedding: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the sums of the embeddings, `(sequences, length, D)`, before any norm, batch by batch."""
        for batch in self._batches:
            yield self.builder.sum_embeddings(embedding, batch)

    def close(self) -> None:
        """Release the activations."""
        for store in (*self._stores, *(memory.store for memory in self._memories)):
            store.close()

    def _every(self, every: int) -> list[Batch]:
        """Return this worker's batches among each `every`-th of the whole text."""
        return self._batches[-self.first_batch % every :: every]

    def _embedded(self, embedding: torch.Tensor, norm: Any) -> ActivationStore:
        """Return the states before the first layer of a stack; `norm`: what follows the sum of the embeddings."""
        store = ActivationStore(self._batches[-1].rows.stop, self._model.shape.hidden_size, self.machine)
        for batch in self._batches:
            total = self.builder.sum_embeddings(embedding, batch)
            store.write(batch.rows, total if norm is None else norm(total))
        return store

    def _memory(self, stream: int) -> Memory | None:
        return self._memories[stream].present if self._memories else None

    def _moved(self, stream: int, batch: Batch, steps: list[Step]) -> torch.Tensor:
        if self._memories:
            assert batch.source is not None
            self._memories[stream].read(batch.source)
        x = self._stores[stream].read(batch.rows).unflatten(0, batch.token_ids.shape)
        for step in steps:
            x = step(x, batch is self._batches[-1])
        if steps:
            self._stores[stream].write(batch.rows, x)
        return x


class _StoredMemory:
    """The encoder's output of one stream, and the part of it that belongs to the present batch."""

    def __init__(self, store: ActivationStore) -> None:
        self.store, self.present = store, Memory(torch.empty(0))

    def read(self, source: Batch) -> None:
        """Make a batch of the source the present one."""
        self.present.states = self.store.read(source.rows).unflatten(0, source.token_ids.shape)
