"""Additive statistics of activations: update with batches, then finish into a record of the rows of all workers.

Batches are summed as in `linalg.sums`, so which worker has which batch does not matter. `finish` is called once, by
all workers together.
"""

from dataclasses import dataclass, replace

import torch

from oneshot.compression.overflow import refuse_overflow
from oneshot.linalg.sums import add_gram_, add_product_, add_sketch_, as_float32, finished_gram
from oneshot.machine import ALONE, Workers
from oneshot.selection import Moments

HELD_OUT_ROWS, HELD_OUT_EVERY = 32, 9  # rows of a block, and blocks: no usual length of sequences is a multiple
TOKENS_PER_COLUMN = 16  # that suffice for the principal directions of a Gram
LITTLE_TEXT = 32_768  # tokens; with more nothing was measured, and a held-out slice takes the memory of two more Grams
LEAST_SHRINKAGE = 0.2  # of Grams that decide low ranks, with any text: results read other text
TOKENS_OF_PRIOR = 5  # for a column, as which the diagonal counts against what different columns have in common


@dataclass(frozen=True)
class Statistics:
    """Sums over the calibration text of the activations `A` that a linear `W` reads.

    Attributes:
        gram: `AᵀA (n, n)` float32.
        residual: `Aᵀ(Y − A Wᵀ) (n, d)` float32: the part of the target that the linear's own output lacks; or None.
        residual_energy: `‖Y − A Wᵀ‖²`, a float64 scalar; zero without a residual.
        num_rows: tokens seen.
        num_targets: tokens that had a target. The residual and its energy are theirs, scaled to `num_rows`.
        sketch: `S A (s, n)` float32, only for pivots; or None.
        moments: means and deviations of the activations; or None.
        value_grams: `VᵀV (G, h, h)` float32 of the values of every KV group, before the softmax weighs them; or None.
        held_out: the part of these sums from a held-out slice of the text; or None.
    """

    gram: torch.Tensor
    residual: torch.Tensor | None
    residual_energy: torch.Tensor
    num_rows: int
    num_targets: int = 0
    sketch: torch.Tensor | None = None
    moments: Moments | None = None
    value_grams: torch.Tensor | None = None
    held_out: "Statistics | None" = None


class GramAccumulator:
    """Sum `G = AᵀA` and, for a two-stream target `Y`, `R = Aᵀ(Y − A Wᵀ)` over rows (STAT section 3.1).

    Products of a batch are float32 and their sums float64, on the device of the activations. Accumulators over
    different batches merge by addition, in any order.

    Args:
        size: `n`, the number of activations (plus one for a constant column if the linear has a bias).
        output_size: `d` if rows may have a target, None otherwise.
    """

    def __init__(self, size: int, *, output_size: int | None, device: torch.device) -> None:
        self._gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        self._residual = (
            None if output_size is None else torch.zeros(size, output_size, dtype=torch.float64, device=device)
        )
        self._energy = torch.zeros((), dtype=torch.float64, device=device)
        self._num_rows = self._num_targets = 0

    def update_(self, activations: torch.Tensor, lost: torch.Tensor | None = None) -> None:
        """Add a batch of rows: `activations (m, n)`, and `lost (m, d)`, their `Y − A Wᵀ`, if they have a target."""
        add_gram_(self._gram, activations)
        self._num_rows += len(activations)
        if lost is not None:
            assert self._residual is not None
            add_product_(self._residual, activations, lost)
            self._energy += lost.float().square().sum()
            self._num_targets += len(activations)

    def merge_(self, other: "GramAccumulator") -> None:
        """Add the statistics of other rows: `stats(X1) + stats(X2) == stats([X1; X2])`."""
        self._gram += other._gram
        if self._residual is not None and other._residual is not None:
            self._residual += other._residual
        self._energy += other._energy
        self._num_rows += other._num_rows
        self._num_targets += other._num_targets

    def finish(self, workers: Workers = ALONE) -> Statistics:
        """Return the sums over the rows of all workers as a record.

        Raises `CheckpointError` if the activations were not finite, `ValueError` if rows could have a target and none
        had one.
        """
        num_rows, num_targets = workers.sum_counts(self._gram.device, self._num_rows, self._num_targets)
        workers.sum_grams_(self._gram)
        workers.sum_(self._energy, *([] if self._residual is None else [self._residual]))
        gram = finished_gram(self._gram)
        del self._gram
        if self._residual is None:
            refuse_overflow(gram)
            return Statistics(gram, None, self._energy, num_rows)
        if not num_targets:
            raise ValueError("no row had a target: give what the linear lacks of it")
        scale = num_rows / num_targets
        residual = as_float32(self._residual).mul_(scale)
        del self._residual
        refuse_overflow(gram, residual)
        return Statistics(gram, residual, scale * self._energy, num_rows, num_targets)


class SplitAccumulator:
    """Sum as a `GramAccumulator`, and also over a held-out slice of the text's rows: every ninth block of 32.

    So neighbouring tokens are on one side, and of sequences of usual lengths one first token of nine is held out; their
    activations can be a thousand times as large as others.

    Args:
        row_offset: index in the whole text of the first row. Others as in `GramAccumulator`.
    """

    def __init__(self, size: int, *, output_size: int | None, device: torch.device, row_offset: int = 0) -> None:
        self._rest, self._held_out = (GramAccumulator(size, output_size=output_size, device=device) for _ in range(2))
        self._row = row_offset

    def update_(self, activations: torch.Tensor, lost: torch.Tensor | None = None) -> None:
        """Add the next rows."""
        numbers = torch.arange(len(activations))
        is_held_out = (self._row + numbers) // HELD_OUT_ROWS % HELD_OUT_EVERY == 0
        for part, own in ((self._rest, numbers[~is_held_out]), (self._held_out, numbers[is_held_out])):
            rows = own.to(activations.device)
            part.update_(activations[rows], None if lost is None else lost[rows])
        self._row += len(activations)

    def finish(self, workers: Workers = ALONE) -> Statistics:
        """Return the sums over all rows of all workers, and as `held_out` the sums over the slice."""
        self._rest.merge_(self._held_out)
        return replace(self._rest.finish(workers), held_out=self._held_out.finish(workers))


class SketchAccumulator:
    """Sum `S A` for a sparse random `S` (STAT section 3.4; CountSketch if `nonzeros` is 1).

    `S` depends only on the seed and on the index of a row in the whole text, so batches and workers add up.

    Args:
        sketch_size: rows `s`. size: `n`. nonzeros: non-zeros per column of `S`. row_offset: index of the first row.
    """

    def __init__(
        self, sketch_size: int, size: int, *, nonzeros: int, seed: int, device: torch.device, row_offset: int = 0
    ) -> None:
        self._sketch = torch.zeros(sketch_size, size, dtype=torch.float64, device=device)
        self._nonzeros, self._seed, self._row_offset = nonzeros, seed, row_offset

    def update_(self, activations: torch.Tensor) -> None:
        """Add the next rows `(m, n)`."""
        add_sketch_(self._sketch, activations, row_offset=self._row_offset, seed=self._seed, nonzeros=self._nonzeros)
        self._row_offset += len(activations)

    def finish(self, workers: Workers = ALONE) -> torch.Tensor:
        """Return `S A (s, n)` float32."""
        workers.sum_(self._sketch)
        return as_float32(self._sketch)


class MomentAccumulator:
    """Average `a` and `a²` over rows, with sums in float64."""

    def __init__(self, size: int, *, device: torch.device) -> None:
        self._sums = torch.zeros(2, size, dtype=torch.float64, device=device)
        self._num_rows = 0

    def update_(self, activations: torch.Tensor) -> None:
        """Add rows `(m, n)`."""
        rows = activations.float()
        self._sums += torch.stack((rows.sum(0), rows.square().sum(0)))
        self._num_rows += len(rows)

    def finish(self, workers: Workers = ALONE) -> Moments:
        """Return the means as a record."""
        [num_rows] = workers.sum_counts(self._sums.device, self._num_rows)
        workers.sum_(self._sums)
        return Moments(*(as_float32(self._sums).double() / num_rows))


class HeadGramAccumulator:
    """Sum `xᵀx (heads, h, h)` of every head's part of the rows, float32; for queries, keys and values."""

    def __init__(self, num_heads: int, head_dim: int, *, device: torch.device) -> None:
        self._grams = torch.zeros(num_heads, head_dim, head_dim, dtype=torch.float64, device=device)

    def update_(self, rows: torch.Tensor) -> None:
        """Add rows `(m, heads · h)`."""
        per_head = rows.float().view(len(rows), *self._grams.shape[:2]).transpose(0, 1)
        self._grams += per_head.mT @ per_head

    def finish(self, workers: Workers = ALONE) -> torch.Tensor:
        """Return the Grams `(heads, h, h)` float32."""
        workers.sum_(self._grams)
        return as_float32(self._grams)


def damping_of(asked: float, num_columns: int, num_rows: float) -> float:
    """Return the damping for a Gram of so many rows: the asked one, and more if a column has few tokens.

    From few tokens the least-squares correction fits their noise: it grows as fewer than `TOKENS_PER_COLUMN` come to a
    column (docs/recipes/oneshot.md#selection-and-correction).
    """
    return asked * max(1.0, TOKENS_PER_COLUMN * num_columns / max(1.0, num_rows))


def shrinkage_of(num_columns: int, num_rows: float) -> float:
    """Return about the share of what different columns of so many rows have in common that is chance, from 0 to 1.

    Products of different columns vary from text to text; between few tokens most of them are chance, while the squares
    on the diagonal are not (docs/recipes/oneshot.md#little-text). It is 0 from `TOKENS_PER_COLUMN`, and of more than
    `LITTLE_TEXT` rows.
    """
    if num_rows > LITTLE_TEXT:
        return 0.0
    tokens = min(num_rows / num_columns, TOKENS_PER_COLUMN)
    return TOKENS_OF_PRIOR * (1 - tokens / TOKENS_PER_COLUMN) / (TOKENS_OF_PRIOR + tokens)


def shrinkage_on_other_text(num_columns: int, num_rows: float) -> float:
    """Return how far a Gram shrinks that decides a low rank: as `shrinkage_of`, but by `LEAST_SHRINKAGE` at least.

    The result will read other text than the Gram is of (docs/recipes/oneshot.md#ranks-of-linears).
    """
    return max(LEAST_SHRINKAGE, shrinkage_of(num_columns, num_rows))


def towards_diagonal(gram: torch.Tensor, share: float) -> torch.Tensor:
    """Return `(1 − s) G + s diag(G)` for a share `s` from 0 to 1; the Gram itself for 0."""
    if not share:
        return gram
    shrunk = gram * (1 - share)
    shrunk.diagonal().copy_(gram.diagonal())
    return shrunk


def batches_apart(num_tokens: int, num_columns: int) -> int:
    """Return n if every n-th batch of the text suffices for the Gram of so many columns."""
    return max(1, num_tokens // (TOKENS_PER_COLUMN * num_columns))


def with_constant_column(activations: torch.Tensor) -> torch.Tensor:
    """Return `[A, 1]`; the last column stands for the bias in the regression."""
    return torch.cat((activations, activations.new_ones(len(activations), 1)), dim=1)
