"""The hidden states of the calibration text on their way through the model, layer by layer.

The *compressed* stream has the hidden states of the compressed model. The *dense* stream has those of the untouched
model; it exists only if a correction's target comes from it. Sublayers are deferred: a pass over the text that has to
read the states anyway also moves them through the sublayers that are waiting.

An encoder–decoder is passed stack by stack. Each stream's final states of the encoder stay, as the memory that the
decoder's cross-attention reads in that stream.
"""

from collections.abc import Callable, Iterator

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

    Args:
        two: whether the dense stream exists.
        compressed_embedding: the embedding `(N, D)` of the compressed stream; None for the dense model's.

    Attributes:
        stack: the stack that the states are in. num_tokens: tokens of all workers. first_row: index of this worker's
            first token in the whole text.
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
        advance: Callable[[float], None] = lambda tokens: None,
    ) -> None:
        if text.num_sequences < machine.workers.size:
            raise CalibrationError(
                f"{text.num_sequences} sequences are too few for {machine.workers.size} processes; give more "
                "--num-sequences."
            )
        part = machine.workers.part(text.num_sequences)
        own = text.part(part)
        self.machine, self.num_tokens = machine, text.num_tokens
        self.first_row = text.part(slice(part.start)).num_tokens
        self.builder = LayerBuilder(model, machine, text.longest)
        self.passes, self.advance = 1.0, advance
        self._model, self.stack = model, model.family.stack
        self._steps: list[Step] = []
        self._dense_steps: list[Step] = []
        embedding = model.read_embedding()
        first = embedding if compressed_embedding is None else compressed_embedding
        self._batches = own.batches(machine.batch_size)
        self._stores = [self._embedded(rows) for rows in ([first, embedding] if two else [first])]
        self._memories: list[_StoredMemory] = []
        # every layer advances by all tokens, though an encoder passes only those of the source
        self._progress = own.num_tokens / self._batches[-1].rows.stop

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
        self._stores = [self._embedded(embedding) for _ in self._stores]

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

        `every`: yield only the first of so many batches; nothing may be deferred then.
        """
        assert every == 1 or not (self._steps or self._dense_steps)
        steps, self._steps = self._steps, []
        dense_steps, self._dense_steps = self._dense_steps, []
        for batch in self._batches[::every]:
            x = self._moved(0, batch, steps)
            yield x, self._moved(1, batch, dense_steps) if self.has_dense else None
            self.advance(self._progress * x.shape[0] * x.shape[1] / self.passes)

    def settle(self) -> None:
        """Move both streams through everything that is deferred."""
        for _ in self.read():
            pass

    def share_read(self, every: int) -> float:
        """Return the share of this worker's tokens that `read(every)` yields."""
        sizes = [batch.token_ids.numel() for batch in self._batches]
        return sum(sizes[::every]) / sum(sizes)

    def read_last(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last batch of both streams; nothing may be deferred."""
        assert not (self._steps)
        assert not (self._dense_steps)
        return self._moved(0, self._batches[-1], []), (
            self._moved(1, self._batches[-1], []) if self.has_dense else None
        )

    def close(self) -> None:
        """Release the activations."""
        for store in (*self._stores, *(memory.store for memory in self._memories)):
            store.close()

    def _embedded(self, embedding: torch.Tensor) -> ActivationStore:
        """Return the states before the first layer of a stack."""
        store = ActivationStore(self._batches[-1].rows.stop, embedding.shape[1], self.machine)
        for batch in self._batches:
            store.write(batch.rows, self.builder.embed(embedding, batch))
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
