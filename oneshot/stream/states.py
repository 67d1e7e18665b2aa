"""The hidden states of the calibration text on their way through the model, layer by layer.

The *compressed* stream has the hidden states of the compressed model. The *dense* stream has those of the untouched
model; it exists only if a correction's target comes from it. Sublayers are deferred: a pass over the text that has to
read the states anyway also moves them through the sublayers that are waiting.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from oneshot.checkpoint import Model
from oneshot.errors import CalibrationError
from oneshot.machine import Machine
from oneshot.stream.layers import LayerBuilder
from oneshot.stream.store import ActivationStore
from oneshot.text import Batch, Text

Step = Callable[[torch.Tensor, bool], torch.Tensor]  # (a batch of states, whether it is the last) -> the next states


class States:
    """Both streams of this worker's part of the text, batch by batch.

    Args:
        two: whether the dense stream exists.
        compressed_embedding: the embedding `(N, D)` of the compressed stream; None for the dense model's.
        compressed_norm: makes the compressed stream's norm of the embeddings from the dense one; None for the same.

    Attributes:
        num_tokens: tokens of all workers. first_row: index of this worker's first token in the whole text.
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
        part = machine.workers.part(text.num_sequences)
        own = text.part(part)
        self.machine, self.num_tokens = machine, text.num_tokens
        self.first_row = text.part(slice(part.start)).num_tokens
        self.builder = LayerBuilder(model, machine, text.longest)
        self.passes, self.advance = 1.0, advance
        self._steps: list[Step] = []
        self._dense_steps: list[Step] = []
        embedding = model.read_embedding()
        first = embedding if compressed_embedding is None else compressed_embedding
        self._batches = own.batches(machine.batch_size)
        self._stores = []
        norm = self.builder.embedding_norm
        own_norm = norm if compressed_norm is None else compressed_norm(norm)
        for rows, follows in [(first, own_norm), (embedding, norm)] if two else [(first, own_norm)]:
            store = ActivationStore(own.num_tokens, rows.shape[1], machine)
            for batch in self._batches:
                total = self.builder.sum_embeddings(rows, batch)
                store.write(batch.rows, total if follows is None else follows(total))
            self._stores.append(store)

    @property
    def has_dense(self) -> bool:
        """Return whether the dense stream exists."""
        return len(self._stores) == 2

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
            self.advance(x.shape[0] * x.shape[1] / self.passes)

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

    def sums_of_embeddings(self, embedding: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the sums of the embeddings, `(sequences, length, D)`, before any norm, batch by batch."""
        for batch in self._batches:
            yield self.builder.sum_embeddings(embedding, batch)

    def close(self) -> None:
        """Release the activations."""
        for store in self._stores:
            store.close()

    def _moved(self, stream: int, batch: Batch, steps: list[Step]) -> torch.Tensor:
        x = self._stores[stream].read(batch.rows).unflatten(0, batch.token_ids.shape)
        for step in steps:
            x = step(x, batch is self._batches[-1])
        if steps:
            self._stores[stream].write(batch.rows, x)
        return x
