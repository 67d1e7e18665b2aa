"""The hidden states of the calibration text on their way through the model, layer by layer.

The *compressed* stream has the hidden states of the compressed model. The *dense* stream has the untouched model's; it
exists only if a correction's target comes from it, and may have only each n-th batch. Sublayers are deferred: a pass
over the text that has to read the states anyway also moves them through the sublayers that are waiting.

An encoder–decoder is passed stack by stack. Each stream's final states of the encoder stay, as the memory that the
decoder's cross-attention reads in that stream. Keys and values that later layers read again stay in the same way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from oneshot.checkpoint import Model
from oneshot.machine import Machine
from oneshot.stream.layer import Layer
from oneshot.stream.layers import LayerBuilder
from oneshot.stream.memory import Memory, memory_of, memory_of_one
from oneshot.stream.store import ActivationStore
from oneshot.tensors import Tensors
from oneshot.text import Batch, Text, num_rows, placed

# (a batch of states, whether errors are measured on it) -> the next states
Step = Callable[[torch.Tensor, bool], torch.Tensor]


class States:
    """Both streams of this worker's part of the text, batch by batch.

    The text is cut into batches before workers share it, so that batches are the same for any number of workers. With
    fewer batches than workers some have no text: what they sum is 0.

    Args:
        dense_every: the dense stream has the first of so many batches of the whole text; 0: it does not exist.
        compressed_embedding: the embedding `(N, D)` of the compressed stream; None for the dense model's.
        further: batches that also pass the layers of the compressed stream, see `memory_of_one`.
        compressed_norm: makes the compressed stream's norm of the embeddings from the dense one; None for the same.

    Attributes:
        stack: the stack that the states are in. num_tokens: tokens of all workers, a decoder's included. stack_tokens:
            tokens of all workers in this stack.
        dense_share: the share of all tokens that the dense stream has.
        part: this worker's sequences of the whole text. first_batch, first_row: indices in it of the first batch and of
            the first token of the part, in this stack.
        passes: how many passes over the text make a layer; `advance` receives tokens divided by it.
    """

    def __init__(
        self,
        model: Model,
        machine: Machine,
        text: Text,
        *,
        dense_every: int = 0,
        compressed_embedding: torch.Tensor | None = None,
        compressed_norm: Callable[[Any], Any] | None = None,
        further: Sequence[Batch] = (),
        advance: Callable[[float], None] = lambda tokens: None,
    ) -> None:
        everywhere = text.batches(machine.batch_size)
        share = machine.workers.part(len(everywhere))
        own, sizes = everywhere[share], [len(batch.token_ids) for batch in everywhere]
        self.part = slice(sum(sizes[: share.start]), sum(sizes[: share.stop]))
        self.machine, self.num_tokens = machine, text.num_tokens
        self.first_batch = share.start
        self.first_row, self.stack_tokens = _rows(own, everywhere)
        self._rows_of_decoder = _rows(_of_decoder(own), _of_decoder(everywhere))
        self.builder, self._longest = LayerBuilder(model, machine, text.longest), text.longest
        self.passes, self.advance = 1.0, advance
        self._model, self.stack = model, model.family.stack
        embedding = model.read_embedding()
        first = embedding if compressed_embedding is None else compressed_embedding
        norm = self.builder.embedding_norm
        own_norm = norm if compressed_norm is None else compressed_norm(norm)
        self._batches = placed(own)
        of_compressed = self._embedded(self._batches, first, own_norm)
        memory = memory_of(model, machine, self._batches, further=further)
        self._compressed = _Stream(dict(enumerate(self._batches)), of_compressed, memory)
        self._dense: _Stream | None = None
        numbers = self._every(dense_every) if dense_every else []
        if numbers:
            batches = placed(own[number] for number in numbers)
            of_number = dict(zip(numbers, batches, strict=True))
            own_memory = memory_of(model, machine, batches, beside=memory)
            self._dense = _Stream(of_number, self._embedded(batches, embedding, norm), own_memory)
        self._judged = numbers[-1] if numbers else len(own) - 1
        self.dense_share = _num_tokens(everywhere[::dense_every]) / _num_tokens(everywhere) if dense_every else 0.0
        # every layer advances by all tokens, though an encoder passes only the source's
        part_tokens = text.part(self.part).num_tokens
        self._progress = part_tokens / max(1, num_rows(self._batches))

    @property
    def has_dense(self) -> bool:
        """Return whether this worker has a batch of the dense stream."""
        return self._dense is not None

    def enter_decoder(self) -> None:
        """Go on to the decoder: the encoder's final norm gives its memory, and its states are the targets' embeddings.

        Nothing may be deferred.
        """
        self._assert_settled()
        norm = self.builder.final_norm(self.stack)
        source_tokens = num_rows(self._batches)
        self.stack = self._model.family.last_stack
        self._batches = _of_decoder(self._batches)
        self.first_row, self.stack_tokens = self._rows_of_decoder
        self._progress *= source_tokens / max(1, num_rows(self._batches))
        embedding = self._model.read_embedding()
        for stream in (self._compressed, self._dense):
            if stream is not None:
                stream.enter_decoder(norm, lambda batches: self._embedded(batches, embedding, None))

    def enter(self, model: Model, entered: Callable[[torch.Tensor, Batch], torch.Tensor]) -> None:
        """Go on to the layers of another model with equal states, whose first ones are made of every batch's.

        Nothing may be deferred.
        """
        self._assert_settled()
        self._model, self.stack = model, model.family.stack
        self.builder = LayerBuilder(model, self.machine, self._longest)
        for stream in (self._compressed, self._dense):
            if stream is not None:
                stream.enter(entered)

    def layer(self, number: int, tensors: Tensors) -> Layer:
        """Return layer `number` with these weights, which the compressed stream passes."""
        return self.builder.layer(number, tensors, self._compressed.memory)

    def dense_layer(self, number: int, tensors: Tensors) -> Layer:
        """Return layer `number` with these weights, which the dense stream passes, or the only stream."""
        stream = self._compressed if self._dense is None else self._dense
        return self.builder.layer(number, tensors, stream.memory)

    def memory_of_one(self, batch: Batch) -> Memory | None:
        """Return what layers read of a batch of `further` beside it; None if they read nothing."""
        return memory_of_one(batch, self._compressed.memory)

    def as_compressed(self, dense: Layer) -> Layer:
        """Return a layer with the same weights as a dense one that the compressed stream passes."""
        return dense.reading(self._compressed.memory)

    def defer(self, step: Step) -> None:
        """Let the next pass move the compressed stream through a step before it reads the states."""
        self._compressed.steps.append(step)

    def defer_dense(self, step: Step) -> None:
        """Let the next pass move the dense stream, if it exists, through a step."""
        if self._dense is not None:
            self._dense.steps.append(step)

    def read(self, every: int = 1, *, again: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield batches `(sequences, length, D)` of the compressed and the dense stream, after the deferred steps.

        The second is None for batches that the dense stream does not have.

        Args:
            every: yield only the first of so many batches of the whole text; nothing may be deferred then.
            again: the next pass reads the same: the steps stay deferred, and the stored states stay where they are.
        """
        if every > 1:
            self._assert_settled()
        compressed, dense = self._compressed, self._dense
        steps, dense_steps = (
            [] if stream is None else list(stream.steps) if again else stream.take_steps()
            for stream in (compressed, dense)
        )
        for number in self._every(every):
            is_judged = number == self._judged
            x = compressed.moved(number, steps, is_judged, store=not again)
            in_dense = dense is not None and number in dense.batches
            yield x, dense.moved(number, dense_steps, is_judged, store=not again) if dense and in_dense else None
            self.advance(self._progress * x.shape[0] * x.shape[1] / self.passes)

    def settle(self) -> None:
        """Move both streams through everything that is deferred."""
        for _ in self.read():
            pass

    def share_read(self, every: int) -> float:
        """Return the share of this worker's tokens that `read(every)` yields."""
        return _num_tokens(self._batches[number] for number in self._every(every)) / max(1, num_rows(self._batches))

    def read_judged(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the batch of both streams that errors are measured on; nothing may be deferred.

        The first is None if this worker has no text, and the second if it has none in the dense stream.
        """
        self._assert_settled()
        if not self._batches:
            return None, None
        x = self._compressed.moved(self._judged, [], True)
        return x, None if self._dense is None else self._dense.moved(self._judged, [], True)

    def sums_of_embeddings(self, embedding: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the sums of the embeddings, `(sequences, length, D)`, before any norm, batch by batch."""
        for batch in self._batches:
            yield self.builder.sum_embeddings(embedding, batch)

    def close(self) -> None:
        """Release the activations."""
        for stream in (self._compressed, self._dense):
            if stream is not None:
                stream.close()

    def _every(self, every: int) -> list[int]:
        """Return the numbers of this worker's batches among each `every`-th of the whole text."""
        return list(range(-self.first_batch % every, len(self._batches), every))

    def _assert_settled(self) -> None:
        for stream in (self._compressed, self._dense):
            assert stream is None or not stream.steps

    def _embedded(self, batches: list[Batch], embedding: torch.Tensor, norm: Any) -> ActivationStore:
        """Return the states before the first layer of a stack; `norm`: what follows the sum of the embeddings."""
        store = ActivationStore(num_rows(batches), self._model.shape.hidden_size, self.machine)
        for batch in batches:
            total = self.builder.sum_embeddings(embedding, batch)
            store.write(batch.rows, total if norm is None else norm(total))
        return store


class _Stream:
    """The stored states of one stream's `batches`, by their number among the worker's, and its deferred steps.

    `memory`: what layers read of the present batch beside the stream; None if they read nothing, as before a decoder.
    """

    def __init__(self, batches: dict[int, Batch], store: ActivationStore, memory: Memory | None) -> None:
        self.batches, self._store, self._encoded = batches, store, list[ActivationStore]()
        self.steps: list[Step] = []
        self.memory = memory

    def take_steps(self) -> list[Step]:
        """Return the deferred steps; those that are deferred from now on wait for the next pass."""
        steps, self.steps = self.steps, []
        return steps

    def moved(self, number: int, steps: list[Step], is_judged: bool, *, store: bool = True) -> torch.Tensor:
        """Return a batch's states after the steps, and store them unless told otherwise."""
        batch = self.batches[number]
        if self.memory is not None:
            if batch.source is not None:
                self.memory.states = self._encoded[0].read_batch(batch.source)
            self.memory.enter(batch)
        x = self._store.read_batch(batch)
        for step in steps:
            x = step(x, is_judged)
        if steps and store:
            self._store.write(batch.rows, x)
        return x

    def enter_decoder(self, norm: Any, embedded: Callable[[list[Batch]], ActivationStore]) -> None:
        """Keep the encoder's states after its final norm as memory, and go on with the targets' embeddings."""
        for batch in self.batches.values():
            self._store.write(batch.rows, norm(self._store.read_batch(batch)))
        batches = _of_decoder(self.batches.values())
        self._encoded, self.memory = [self._store], Memory()
        self.batches, self._store = dict(zip(self.batches, batches, strict=True)), embedded(batches)

    def enter(self, entered: Callable[[torch.Tensor, Batch], torch.Tensor]) -> None:
        """Replace the states of every batch."""
        for batch in self.batches.values():
            self._store.write(batch.rows, entered(self._store.read_batch(batch), batch))

    def close(self) -> None:
        for store in (self._store, *self._encoded):
            store.close()
        if self.memory is not None:
            self.memory.close()


def _of_decoder(batches: Iterable[Batch]) -> list[Batch]:
    return [batch.decoder for batch in batches if batch.decoder is not None]


def _rows(own: Sequence[Batch], everywhere: Sequence[Batch]) -> tuple[int, int]:
    """Return the index of a worker's first row among the rows of all workers, and the number of these rows."""
    return own[0].rows.start if own else 0, num_rows(everywhere)


def _num_tokens(batches: Iterable[Batch]) -> int:
    """Return the tokens of batches, without a decoder's."""
    return sum(batch.token_ids.numel() for batch in batches)
