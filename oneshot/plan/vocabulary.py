"""Ranks for the ranges of a tied embedding's vocabulary."""

import numpy as np
import torch

from oneshot.linalg.allocation import least_damage
from oneshot.records import TableShape

NUM_RANGES = 8  # each has a map of its own to store
RANK_STEP = 32  # of ranks, or a sixteenth of the width where that is less


def vocabulary_ranges(vocab_size: int) -> list[slice]:
    """`NUM_RANGES` slices of the vocabulary, as equal as can be; fewer where there are fewer tokens."""
    rows = -(-vocab_size // NUM_RANGES)
    return [slice(start, min(start + rows, vocab_size)) for start in range(0, vocab_size, rows)]


def table_options(errors: torch.Tensor, vocab_size: int) -> list[list[TableShape]]:
    """For every range of the vocabulary: the ranks with which it takes fewer parameters than whole, and that.

    `errors (ranges, D + 1)` that are infinite forbid a rank (`range_errors`).
    """
    width = errors.shape[1] - 1
    step = min(RANK_STEP, max(1, width // 16))
    options = []
    for part, lost in zip(vocabulary_ranges(vocab_size), errors, strict=True):
        rows = part.stop - part.start
        tables = [TableShape(rows, rank) for rank in range(step, width, step) if lost[rank].isfinite()]
        smaller = [table for table in tables if table.parameters(width) < rows * width]
        options.append([*smaller, TableShape(rows, width)])
    return options


def smaller_tables(errors: torch.Tensor, vocab_size: int, share: float) -> tuple[TableShape, ...]:
    """The ranks of least error (`range_errors`) with at most a share of the whole embedding's parameters.

    All of it where no ranks take so few.
    """
    width, options = errors.shape[1] - 1, table_options(errors, vocab_size)
    damages = [errors[index, [table.rank for table in tables]].numpy() for index, tables in enumerate(options)]
    costs = [np.array([float(table.parameters(width)) for table in tables]) for tables in options]
    chosen = least_damage(damages, costs, share * vocab_size * width)
    if chosen is None:
        return tuple(tables[-1] for tables in options)
    return tuple(tables[index] for tables, index in zip(options, chosen, strict=True))
