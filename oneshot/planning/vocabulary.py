"""Ranks for the ranges of an embedding's vocabulary."""

import numpy as np
import torch

from oneshot.architecture import TableShape
from oneshot.linalg.allocation import least_damage

NUM_RANGES = 8  # each stores its own map
RANK_STEP = 32  # between ranks, or a sixteenth of the width if that is less


def vocabulary_ranges(vocab_size: int) -> list[slice]:
    """Return `NUM_RANGES` nearly equal slices of the vocabulary; fewer if there are fewer tokens."""
    rows = -(-vocab_size // NUM_RANGES)
    return [slice(start, min(start + rows, vocab_size)) for start in range(0, vocab_size, rows)]


def equal_tables(vocab_size: int, width: int) -> list[tuple[TableShape, ...]]:
    """Return the ranges of the vocabulary at equal ranks that take fewer parameters than the whole, lowest first."""
    rows = [part.stop - part.start for part in vocabulary_ranges(vocab_size)]
    tables = [tuple(TableShape(count, rank) for count in rows) for rank in _ranks(width)]
    return [ranges for ranges in tables if sum(table.parameters(width) for table in ranges) < vocab_size * width]


def table_options(errors: torch.Tensor, vocab_size: int) -> list[list[TableShape]]:
    """Return for every range of the vocabulary the ranks that take fewer parameters than the whole, and the whole.

    An infinite entry of `errors (ranges, D + 1)` forbids a rank (`range_errors`).
    """
    width = errors.shape[1] - 1
    options = []
    for part, lost in zip(vocabulary_ranges(vocab_size), errors, strict=True):
        rows = part.stop - part.start
        tables = [TableShape(rows, rank) for rank in _ranks(width) if lost[rank].isfinite()]
        smaller = [table for table in tables if table.parameters(width) < rows * width]
        options.append([*smaller, TableShape(rows, width)])
    return options


def smaller_tables(errors: torch.Tensor, vocab_size: int, share: float) -> tuple[TableShape, ...]:
    """Return the ranks of least error (`range_errors`) with at most a share of the whole embedding's parameters.

    The whole embedding stays if no ranks take so few.
    """
    width, options = errors.shape[1] - 1, table_options(errors, vocab_size)
    damages = [errors[index, [table.rank for table in tables]].numpy() for index, tables in enumerate(options)]
    costs = [np.array([float(table.parameters(width)) for table in tables]) for tables in options]
    chosen = least_damage(damages, costs, share * vocab_size * width)
    if chosen is None:
        return tuple(tables[-1] for tables in options)
    return tuple(tables[index] for tables, index in zip(options, chosen, strict=True))


def _ranks(width: int) -> range:
    step = min(RANK_STEP, max(1, width // 16))
    return range(step, width, step)
