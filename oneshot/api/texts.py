"""Text and tokens in memory, written to a file that a run reads as any other source."""

import inspect
import itertools
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oneshot.config import TextOptions
from oneshot.errors import CalibrationError
from oneshot.text import (
    LABELS,
    MASK,
    SHORT_NAMES,
    TOKENS,
    OddRecords,
    is_turn,
    names_file,
    present_row,
    save_token_ids,
    save_token_rows,
    split_sources,
    text_tokens,
)

MOST_TEXTS = 10_000  # of a data set, after shuffling: as many as the buffer in which a data set of the hub is shuffled
TEXT_FILE, TOKEN_FILE = "given-text.jsonl", "given-tokens.safetensors"

Sizes = dict[str, int]


@dataclass(frozen=True)
class Wanted:
    """The sequences that rows of tokens should make: how many (None: all), and of how many tokens each.

    Rows of one length, which is not too short, are a sequence each and are cut; others are joined and cut when they are
    read. If no length is asked for, it is the longest row's, or what is usual if rows of several lengths are longer.
    """

    num_sequences: int | None
    sequence_length: int | None

    def length(self, shortest: int, longest: int) -> int:
        """Return the tokens of a sequence of rows with such lengths."""
        usual = longest if shortest == longest else min(longest, TextOptions().sequence_length)
        return self.sequence_length or usual

    def count(self, num_rows: int, num_tokens: int, shortest: int, longest: int) -> int:
        """Return the sequences that so many rows with so many tokens together make."""
        length = self.length(shortest, longest)
        return num_rows if shortest == longest >= length else num_tokens // length


def listed_sources(text: Any) -> list[str] | None:
    """Return the names in a list of paths, of names of files and of short names of data sets; None for other text."""
    is_list = isinstance(text, list | tuple) and len(text) > 0
    return [os.fspath(item) for item in text] if is_list and all(map(_is_source, text)) else None


def _is_source(item: Any) -> bool:
    return isinstance(item, os.PathLike) or (isinstance(item, str) and (item in SHORT_NAMES or names_file(item)))


def joined(sources: Sequence[str]) -> str:
    """Return sources as one name. Raises `CalibrationError` if a plus sign in a name would divide it."""
    name = "+".join(sources)
    if split_sources(name) != [*sources]:
        odd = next(source for source in sources if "+" in source)
        raise CalibrationError(
            f"{odd} has a plus sign, which joins sources; rename the file, or give every "
            "source as an element of its own."
        )
    return name


def save_text(
    text: Any, folder: Path, *, num_sequences: int, seed: int, sequence_length: int | None = None
) -> tuple[str, Sizes]:
    """Write text or tokens in memory into a folder; return the name of the source, and the sizes of given tokens.

    Args:
        text: strings; chats, each a list of messages with `role` and `content`; rows as dictionaries; a
            `datasets.Dataset`; token ids as an integer tensor or array `(sequences, length)`, or as lists; a dictionary
            or rows with `input_ids`, and an `attention_mask` if they are padded; or a `DataLoader` whose batches hold
            such tokens, or strings.
        num_sequences: sequences after which no more tokens of a `DataLoader` or of rows are read.
        seed: seed of the order in which rows of a data set are taken.
        sequence_length: tokens of each sequence; None: as `Wanted` has it.

    Raises `CalibrationError` for anything else, and for no text at all.
    """
    wanted, every = Wanted(num_sequences, sequence_length), Wanted(None, sequence_length)
    if isinstance(text, torch.Tensor | np.ndarray):
        ids = torch.as_tensor(text)
        save_token_ids(ids, folder / TOKEN_FILE)
        return str(folder / TOKEN_FILE), _sizes(every, len(ids), ids.numel(), ids.shape[1], ids.shape[1])
    if isinstance(text, torch.utils.data.DataLoader):
        return _save_rows(_loader_rows(text), folder, wanted)
    if isinstance(text, Mapping) and TOKENS in text:  # as a tokenizer returns it
        return _save_tokens(_batch_rows(text), folder, every)
    if type(text).__module__.partition(".")[0] == "datasets":
        return _save_rows(_dataset_rows(text, seed), folder, wanted, most_texts=MOST_TEXTS)
    if isinstance(text, Mapping | str | bytes) or not isinstance(text, Iterable):
        raise CalibrationError(
            f"An object of type {type(text).__name__} is not text; give a path, a list of strings or chats, a Dataset, "
            "a DataLoader, or a tensor of token ids."
        )
    rest = iter(text)
    items = list(itertools.islice(rest, 1))
    if items and _is_ids(items[0]):
        items += rest
        if all(map(_is_ids, items)):
            return _save_tokens(({TOKENS: item} for item in items), folder, every)
    return _save_rows(_given_rows(itertools.chain(items, rest)), folder, wanted)


def _is_ids(item: Any) -> bool:
    if isinstance(item, torch.Tensor | np.ndarray):
        return item.ndim == 1
    return isinstance(item, Sequence) and len(item) > 0 and all(type(number) is int for number in item)


def _given_rows(items: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of what is given one by one; what is not text is left out and told, unless most is such."""
    odd = OddRecords("the calibration text")
    for item in items:
        try:
            row = _row(item)
        except CalibrationError as error:
            odd.leave_out(error)
            continue
        odd.count_good()
        yield row
    odd.check()
    odd.tell()


def _row(item: Any) -> dict[str, Any]:
    """Return the row of a file of JSON lines that holds a text, a chat or a row."""
    if _is_source(item):
        raise CalibrationError(
            f"{os.fspath(item)} names a source and is no text; give a list of sources alone, or text."
        )
    if isinstance(item, str):
        return {"text": item}
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, Sequence) and item and all(map(is_turn, item)):
        return {"messages": [dict(part) for part in item]}
    raise CalibrationError(f"{reprlib.repr(item)} is neither a string, nor a chat, nor a row of a data set.")


def _dataset_rows(dataset: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `datasets.Dataset` or `IterableDataset` in a seeded order."""
    if isinstance(dataset, Mapping):
        raise CalibrationError(f"The data set has the splits {', '.join(dataset)}; give one of them.")
    return map(present_row, dataset.shuffle(seed=seed))


def _save_rows(
    rows: Iterator[dict[str, Any]], folder: Path, wanted: Wanted, *, most_texts: int | None = None
) -> tuple[str, Sizes]:
    """Write rows of text, at most so many, or the first ones of tokens."""
    first = next(rows, None)
    if first is None:
        raise CalibrationError("The calibration text is empty; give some.")
    every = itertools.chain([first], rows)
    if TOKENS in first and "text" not in first:
        return _save_tokens(every, folder, wanted)
    path = folder / TEXT_FILE
    with path.open("w", encoding="utf-8") as file:
        for row in itertools.islice(every, most_texts):
            plain = {name: value for name, value in row.items() if _is_told(value)}
            file.write(json.dumps(plain, default=_plain) + "\n")
    return str(path), {}


def _is_told(value: Any) -> bool:
    """Return whether a column may be text, a conversation, or say something to a chat template."""
    return isinstance(value, str | bool | int | float | Mapping | Sequence) and not isinstance(value, bytes)


def _plain(value: Any) -> Any:
    """Return an object inside a row as JSON can hold it; what a template cannot read is named by its type."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if inspect.isroutine(value):  # a tool, as apply_chat_template takes it
        from transformers.utils import get_json_schema

        return get_json_schema(value)
    dump: Callable[[], Any] | None = getattr(value, "model_dump", None)  # of pydantic
    return f"<{type(value).__name__}>" if dump is None else dump()


def _loader_rows(loader: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of batches, of strings or of tokens; a batch is asked for when the one before is used up."""
    batch = None
    for batch in loader:
        inputs = batch.get(TOKENS, batch.get("text")) if isinstance(batch, Mapping) else batch
        if isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], torch.Tensor):
            inputs = inputs[0]
        if isinstance(inputs, torch.Tensor) and inputs.ndim == 2:
            yield from _batch_rows(batch if isinstance(batch, Mapping) else {TOKENS: inputs})
        elif isinstance(inputs, list | tuple) and inputs and all(isinstance(item, str) for item in inputs):
            yield from ({"text": text} for text in inputs)
        else:
            raise CalibrationError(
                f"A batch of the DataLoader is {reprlib.repr(batch)}; give input_ids (sequences, length), or strings."
            )
    if batch is None:
        raise CalibrationError("The DataLoader yields no batches; give one with text.")


def _batch_rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a batch of tokens."""
    columns = {name: batch[name] for name in (TOKENS, MASK, LABELS) if batch.get(name) is not None}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _save_tokens(rows: Iterable[Mapping[str, Any]], folder: Path, wanted: Wanted) -> tuple[str, Sizes]:
    """Write rows of tokens without their padding: all, or the first ones that make the sequences that are wanted."""
    found: list[torch.Tensor] = []
    num_tokens, lengths = 0, (0, 0)
    for row in rows:
        tokens = text_tokens(row, "The calibration text", {})
        if not len(tokens):
            continue
        found.append(tokens)
        num_tokens += len(tokens)
        lengths = min(lengths[0] or len(tokens), len(tokens)), max(lengths[1], len(tokens))
        if wanted.num_sequences is not None and wanted.count(len(found), num_tokens, *lengths) >= wanted.num_sequences:
            break
    if not found:
        raise CalibrationError("The calibration text is empty; give some.")
    save_token_rows(found, folder / TOKEN_FILE)
    return str(folder / TOKEN_FILE), _sizes(wanted, len(found), num_tokens, *lengths)


def _sizes(wanted: Wanted, num_rows: int, num_tokens: int, shortest: int, longest: int) -> Sizes:
    """Return what is read of tokens if the caller says nothing else."""
    count = max(1, wanted.count(num_rows, num_tokens, shortest, longest))
    if wanted.num_sequences is not None:
        count = min(count, wanted.num_sequences)
    return {"num_sequences": count, "sequence_length": wanted.length(shortest, longest)}
