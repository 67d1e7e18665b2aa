"""Examples with their own lengths: how they are gathered and ordered, and an encoder's examples."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from oneshot.errors import CalibrationError
from oneshot.text.packing import Text, shares, tokenise
from oneshot.text.sources import iter_pairs

logger = logging.getLogger(__name__)

Example = tuple[list[int], list[int]]  # two lists of numbers; which ones, the reader of the examples says


def load_examples(
    sources: Sequence[str], tokenizer: Any, *, num_tokens: int, longest: int, seed: int, with_types: bool
) -> Text:
    """Read and tokenise examples for an encoder: single texts, or pairs of `text` and `text_pair`.

    Examples keep the tokenizer's special tokens. What is longer than `longest` tokens becomes several examples; a pair
    is cut. They are ordered as in `gathered`.

    Args:
        sources: each as in `iter_documents`, with tokens as in `shares`. num_tokens: at most so many; fewer, with a
            warning, if the text is shorter. with_types: whether the model tells the texts of a pair apart.

    Raises `CalibrationError` if a source cannot be read or holds nothing.
    """

    def read(source: str) -> Iterator[Example]:
        for text, pair in iter_pairs(source, seed):
            yield from encode(tokenizer, text, pair, longest, source)

    examples = gathered(
        sources, read, lambda example: (len(example[0]),), num_tokens=num_tokens, seed=seed, record="text"
    )
    return Text(
        padded([ids for ids, _ in examples]),
        "+".join(sources),
        torch.tensor([len(ids) for ids, _ in examples]),
        padded([types for _, types in examples]) if with_types else None,
    )


def gathered(
    sources: Sequence[str],
    read: Callable[[str], Iterable[Example]],
    lengths_of: Callable[[Example], tuple[int, ...]],
    *,
    num_tokens: int,
    seed: int,
    record: str,
) -> list[Example]:
    """Take examples from all sources, up to `num_tokens` in total, grouped by length.

    So they can pass a layer together without padding. Lengths have a seeded order; the one with the most tokens is
    last.

    Args:
        sources: they give tokens as in `shares`. read: yields the examples of a source. lengths_of: the tokens of each
            part of an example that passes layers. record: what a record should hold, for the error message.

    Raises `CalibrationError` if a source holds nothing.
    """
    by_lengths: dict[tuple[int, ...], list[Example]] = {}
    for source, wanted in shares(num_tokens, sources).items():
        for example in _first(read(source), lengths_of, wanted, source, record):
            by_lengths.setdefault(lengths_of(example), []).append(example)
    most = max(by_lengths, key=lambda lengths: (sum(lengths) * len(by_lengths[lengths]), lengths))
    ascending = sorted(by_lengths)
    order = torch.randperm(len(ascending), generator=torch.Generator().manual_seed(seed)).tolist()
    runs = sorted((ascending[place] for place in order), key=lambda lengths: lengths == most)
    return [example for lengths in runs for example in by_lengths[lengths]]


def _first(
    examples: Iterable[Example],
    lengths_of: Callable[[Example], tuple[int, ...]],
    num_tokens: int,
    source: str,
    record: str,
) -> list[Example]:
    """Return the first examples of a source with at most so many tokens together, but at least one."""
    taken: list[Example] = []
    total = 0
    for example in examples:
        total += sum(lengths_of(example))
        if total > num_tokens and taken:
            return taken
        taken.append(example)
    if not taken:
        raise CalibrationError(f"{source} holds no text; give one record with {record} per line.")
    logger.warning("%s holds %d tokens of the %d asked for.", source, total, num_tokens)
    return taken


def encode(tokenizer: Any, text: str, pair: str | None, longest: int, source: str) -> Iterator[Example]:
    """Yield the tokens of a text, or of a pair, and which text each is of.

    A text longer than `longest` tokens gives several examples; a pair is cut. Raises `CalibrationError`.
    """
    options = {"truncation": True, "max_length": longest, "return_token_type_ids": True}
    if pair is None:
        encoded = tokenise(tokenizer, source, [text], return_overflowing_tokens=True, **options)
    else:
        encoded = tokenise(tokenizer, source, [text], [pair], **options)
    yield from zip(encoded["input_ids"], encoded["token_type_ids"], strict=True)


def padded(rows: Sequence[Sequence[int]], value: int = 0) -> torch.Tensor:
    """Return rows of different lengths as int64 `(rows, longest)`, filled up at the end."""
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
