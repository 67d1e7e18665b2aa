"""Text and tokens in memory, written to a file that a run reads as any other source."""

import inspect
import itertools
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oneshot.config import TextOptions
from oneshot.errors import CalibrationError
from oneshot.text import (
    LABELS,
    MASK,
    TOKENS,
    OddRecords,
    is_turn,
    present_row,
    save_token_ids,
    save_token_rows,
    text_tokens,
)

MOST_ROWS = 10_000  # of a data set, after shuffling: as many as the buffer in which a data set of the hub is shuffled
TEXT_FILE, TOKEN_FILE = "given-text.jsonl", "given-tokens.safetensors"

Sizes = dict[str, int]


def save_text(text: Any, folder: Path, *, num_sequences: int, seed: int) -> tuple[str, Sizes]:
    """Write text or tokens in memory into a folder; return the name of the source, and the sizes of given tokens.

    Args:
        text: strings; chats, each a list of messages with `role` and `content`; rows as dictionaries; a
            `datasets.Dataset`; token ids as an integer tensor or array `(sequences, length)`, or as lists; a dictionary
            or rows with `input_ids`, and an `attention_mask` if they are padded; or a `DataLoader` whose batches hold
            such tokens, or strings.
        num_sequences: at most so many sequences of tokens are read of a `DataLoader` and of rows.
        seed: seed of the order in which rows of a large data set are taken.

    Raises `CalibrationError` for anything else, and for no text at all.
    """
    if isinstance(text, torch.Tensor | np.ndarray):
        ids = torch.as_tensor(text)
        save_token_ids(ids, folder / TOKEN_FILE)
        return str(folder / TOKEN_FILE), {"num_sequences": len(ids), "sequence_length": ids.shape[1]}
    if isinstance(text, torch.utils.data.DataLoader):
        return _save_loader(text, folder, num_sequences)
    if isinstance(text, Mapping) and TOKENS in text:  # as a tokenizer returns it
        return _save_tokens(_batch_rows(text), folder)
    if type(text).__module__.partition(".")[0] == "datasets":
        return _save_rows(_dataset_rows(text, seed), folder, num_sequences)
    if isinstance(text, Mapping | str | bytes) or not isinstance(text, Iterable):
        raise CalibrationError(
            f"An object of type {type(text).__name__} is not text; give a path, a list of strings or chats, a Dataset, "
            "a DataLoader, or a tensor of token ids."
        )
    items = list(text)
    if items and all(_is_ids(item) for item in items):
        return _save_tokens(({TOKENS: item} for item in items), folder)
    return _save_rows(_given_rows(items), folder, num_sequences)


def _is_ids(item: Any) -> bool:
    if isinstance(item, torch.Tensor | np.ndarray):
        return item.ndim == 1
    return isinstance(item, Sequence) and len(item) > 0 and all(type(number) is int for number in item)


def _given_rows(items: Sequence[Any]) -> Iterator[dict[str, Any]]:
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
    if isinstance(item, str):
        return {"text": item}
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, Sequence) and item and all(map(is_turn, item)):
        return {"messages": [dict(part) for part in item]}
    raise CalibrationError(f"{reprlib.repr(item)} is neither a string, nor a chat, nor a row of a data set.")


def _dataset_rows(dataset: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows of a `datasets.Dataset` or `IterableDataset` in a seeded order, at most `MOST_ROWS`."""
    if isinstance(dataset, Mapping):
        raise CalibrationError(f"The data set has the splits {', '.join(dataset)}; give one of them.")
    return map(present_row, itertools.islice(iter(dataset.shuffle(seed=seed)), MOST_ROWS))


def _save_rows(rows: Iterable[dict[str, Any]], folder: Path, num_sequences: int) -> tuple[str, Sizes]:
    """Write rows of text, or the first ones of tokens."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise CalibrationError("The calibration text is empty; give some.")
    every = itertools.chain([first], rows)
    if TOKENS in first and "text" not in first:
        return _save_tokens(itertools.islice(every, num_sequences), folder)
    path = folder / TEXT_FILE
    with path.open("w", encoding="utf-8") as file:
        for row in every:
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


def _save_loader(loader: Iterable[Any], folder: Path, num_sequences: int) -> tuple[str, Sizes]:
    """Write the sequences of batches: strings as text; tokens as rows."""
    texts: list[str] = []
    rows: list[dict[str, Any]] = []
    for batch in loader:
        inputs = batch.get(TOKENS, batch.get("text")) if isinstance(batch, Mapping) else batch
        if isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], torch.Tensor):
            inputs = inputs[0]
        if isinstance(inputs, torch.Tensor) and inputs.ndim == 2:
            rows += _batch_rows(batch if isinstance(batch, Mapping) else {TOKENS: inputs})
        elif isinstance(inputs, list | tuple) and inputs and all(isinstance(item, str) for item in inputs):
            texts += inputs
        else:
            raise CalibrationError(
                f"A batch of the DataLoader is {reprlib.repr(batch)}; give input_ids (sequences, length), or strings."
            )
        if len(rows) >= num_sequences:
            break
    if texts:
        return _save_rows(({"text": text} for text in texts), folder, num_sequences)
    if not rows:
        raise CalibrationError("The DataLoader yields no batches; give one with text.")
    return _save_tokens(rows[:num_sequences], folder)


def _batch_rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a batch of tokens."""
    columns = {name: batch[name] for name in (TOKENS, MASK, LABELS) if batch.get(name) is not None}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _save_tokens(rows: Iterable[Mapping[str, Any]], folder: Path) -> tuple[str, Sizes]:
    """Write rows of tokens without their padding.

    Rows of several lengths are joined and cut when they are read: to the longest, or to what is usual.
    """
    found = [text_tokens(row, "The calibration text", {}) for row in rows]
    found = [row for row in found if len(row)]
    if not found:
        raise CalibrationError("The calibration text is empty; give some.")
    save_token_rows(found, folder / TOKEN_FILE)
    lengths = {len(row) for row in found}
    length = max(lengths) if len(lengths) == 1 else min(max(lengths), TextOptions().sequence_length)
    return str(folder / TOKEN_FILE), {"num_sequences": sum(map(len, found)) // length, "sequence_length": length}
