"""The hidden states of the calibration text on their way through the model, layer by layer.

The *compressed* stream has the hidden states of the compressed model. The *dense* stream has those of the untouched
model; it exists only if a correction's target comes from it. Sublayers are deferred: a pass over the text that has to
read the states anyway also moves them through the sublayers that are waiting.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
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

    The text is cut into batches before workers share it, so that batches are the same for any number of workers. Only
    if there are fewer batches than workers, batches are smaller.

    Args:
        two: whether the dense stream exists.
        compressed_embedding: the embedding `(N, D)` of the compressed stream; None for the dense model's.
        compressed_norm: makes the compressed stream's norm of the embeddings from the dense one; None for the same.

    Attributes:
        num_tokens: tokens of all workers.
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
        self._steps: list[Step] = []
        self._dense_steps: list[Step] = []
        embedding = model.read_embedding()
        first = embedding if compressed_embedding is None else compressed_embedding
        self._batches = [
            replace(batch, rows=slice(batch.rows.start - self.first_row, batch.rows.stop - self.first_row))
            for batch in own
        ]
        self._stores = []
        norm = self.builder.embedding_norm
        own_norm = norm if compressed_norm is None else compressed_norm(norm)
        for rows, follows in [(first, own_norm), (embedding, norm)] if two else [(first, own_norm)]:
            store = ActivationStore(self._batches[-1].rows.stop, rows.shape[1], machine)
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

        `every`: yield only the first of so many batches of the whole text; nothing may be deferred then.
        """
        assert every == 1 or not (self._steps or self._dense_steps)
        steps, self._steps = self._steps, []
        dense_steps, self._dense_steps = self._dense_steps, []
        for batch in self._every(every):
            x = self._moved(0, batch, steps)
            yield x, self._moved(1, batch, dense_steps) if self.has_dense else None
            self.advance(x.shape[0] * x.shape[1] / self.passes)

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
        for store in self._stores:
            store.close()

    def _every(self, every: int) -> list[Batch]:
        """Return this worker's batches among each `every`-th of the whole text."""
        return self._batches[-self.first_batch % every :: every]

    def _moved(self, stream: int, batch: Batch, steps: list[Step]) -> torch.Tensor:
        x = self._stores[stream].read(batch.rows).unflatten(0, batch.token_ids.shape)
        for step in steps:
            x = step(x, batch is self._batches[-1])
        if steps:
            self._stores[stream].write(batch.rows, x)
        return x
