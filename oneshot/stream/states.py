"""The hidden states of the calibration text on their way through the model, layer by layer.

The *compressed* stream has the hidden states of the compressed model. The *dense* stream has those of the untouched
model; it exists only if a correction's target comes from it. Sublayers are deferred: a pass over the text that has to
read the states anyway also moves them through the sublayers that are waiting.
"""

from collections.abc import Callable, Iterator

import torch

from oneshot.checkpoint import Model
from oneshot.errors import CalibrationError
from oneshot.machine import Machine
from oneshot.stream.layers import LayerBuilder
from oneshot.stream.store import ActivationStore
from oneshot.text import Text

Step = Callable[[torch.Tensor, bool], torch.Tensor]  # (a batch of states, whether it is the last) -> the next states


class States:
    """Both streams of this worker's part of the text, batch by batch.

    The text is cut into batches before workers share it, so that batches are the same for any number of workers. Only
    if there are fewer batches than workers, batches are smaller.

    Args:
        two: whether the dense stream exists.
        compressed_embedding: the embedding `(N, D)` of the compressed stream; None for the dense model's.

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
        advance: Callable[[float], None] = lambda tokens: None,
    ) -> None:
        num_sequences, length = text.token_ids.shape
        if num_sequences < machine.workers.size:
            raise CalibrationError(
                f"{num_sequences} sequences are too few for {machine.workers.size} processes; give more "
                "--num-sequences."
            )
        everywhere = batches(num_sequences, machine.batch_size)
        if len(everywhere) < machine.workers.size:
            everywhere = batches(num_sequences, num_sequences // machine.workers.size)
        share = machine.workers.part(len(everywhere))
        own = everywhere[share]
        self.part = slice(own[0].start, own[-1].stop)
        self.machine, self.num_tokens = machine, text.num_tokens
        self.first_batch, self.first_row = share.start, self.part.start * length
        self.builder = LayerBuilder(model, machine, length)
        self.passes, self.advance = 1.0, advance
        self._steps: list[Step] = []
        self._dense_steps: list[Step] = []
        token_ids, embedding = text.token_ids[self.part], model.read_embedding()
        first = embedding if compressed_embedding is None else compressed_embedding
        self._batches = [slice(batch.start - self.part.start, batch.stop - self.part.start) for batch in own]
        self._stores = []
        for rows in [first, embedding] if two else [first]:
            store = ActivationStore((len(token_ids), length, rows.shape[1]), machine)
            for batch in self._batches:
                store.write(batch, self.builder.embed(rows, token_ids[batch]))
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
        """Return the share of this worker's sequences that `read(every)` yields."""
        read = sum(batch.stop - batch.start for batch in self._every(every))
        return read / (self.part.stop - self.part.start)

    def read_last(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last batch of both streams; nothing may be deferred."""
        assert not (self._steps)
        assert not (self._dense_steps)
        return self._moved(0, self._batches[-1], []), (
            self._moved(1, self._batches[-1], []) if self.has_dense else None
        )

    def close(self) -> None:
        """Release the activations."""
        for store in self._stores:
            store.close()

    def _every(self, every: int) -> list[slice]:
        """Return this worker's batches among each `every`-th of the whole text."""
        return self._batches[-self.first_batch % every :: every]

    def _moved(self, stream: int, batch: slice, steps: list[Step]) -> torch.Tensor:
        x = self._stores[stream].read(batch)
        for step in steps:
            x = step(x, batch is self._batches[-1])
        if steps:
            self._stores[stream].write(batch, x)
        return x


def batches(num_sequences: int, batch_size: int) -> list[slice]:
    """Return slices of at most `batch_size` sequences."""
    return [slice(start, min(start + batch_size, num_sequences)) for start in range(0, num_sequences, batch_size)]
