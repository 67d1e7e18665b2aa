"""Text and tokens in memory, written to a file that a run reads as any other source."""

import itertools
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oneshot.errors import CalibrationError
from oneshot.text import save_token_ids

MOST_ROWS = 10_000  # of a data set, after shuffling: as many as the buffer in which a data set of the hub is shuffled
TEXT_FILE, TOKEN_FILE = "given-text.jsonl", "given-tokens.safetensors"

Sizes = dict[str, int]


def save_text(text: Any, folder: Path, *, num_sequences: int, seed: int) -> tuple[str, Sizes]:
    """Write text or tokens in memory into a folder; return the name of the source, and the sizes of given tokens.

    Args:
        text: strings; chats, each a list of messages with `role` and `content`; rows as dictionaries; a
            `datasets.Dataset`; token ids as an integer tensor or array `(sequences, length)`; or a `DataLoader` whose
            batches hold `input_ids`, with an `attention_mask` if they are padded, or strings.
        num_sequences: at most so many sequences are read of a `DataLoader`.
        seed: seed of the order in which rows of a large data set are taken.

    Raises `CalibrationError` for anything else, and for no text at all.
    """
    if isinstance(text, torch.Tensor | np.ndarray):
        return _save_ids(torch.as_tensor(text), folder)
    if isinstance(text, torch.utils.data.DataLoader):
        return _save_loader(text, folder, num_sequences)
    if type(text).__module__.partition(".")[0] == "datasets":
        return _save_rows(_dataset_rows(text, seed), folder)
    if isinstance(text, Mapping | str | bytes) or not isinstance(text, Iterable):
        raise CalibrationError(
            f"An object of type {type(text).__name__} is not text; give a path, a list of strings or chats, a Dataset, "
            "a DataLoader, or a tensor of token ids."
        )
    items = list(text)
    if items and all(_is_ids(item) for item in items):
        if len({len(item) for item in items}) > 1:
            raise CalibrationError("Lists of token ids are of several lengths; cut them to one, or give the texts.")
        return _save_ids(torch.as_tensor(np.array(items)), folder)
    return _save_rows(map(_row, items), folder)


def _is_ids(item: Any) -> bool:
    if isinstance(item, torch.Tensor | np.ndarray):
        return item.ndim == 1
    return isinstance(item, Sequence) and len(item) > 0 and all(type(number) is int for number in item)


def _row(item: Any) -> dict[str, Any]:
    """Return the row of a file of JSON lines that holds a text, a chat or a row."""
    if isinstance(item, str):
        return {"text": item}
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, Sequence) and item and all(isinstance(part, Mapping) and "role" in part for part in item):
        return {"messages": [dict(part) for part in item]}
    raise CalibrationError(f"{reprlib.repr(item)} is neither a string, nor a chat, nor a row of a data set.")


def _dataset_rows(dataset: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows of a `datasets.Dataset` or `IterableDataset` in a seeded order, at most `MOST_ROWS`."""
    if isinstance(dataset, Mapping):
        raise CalibrationError(f"The data set has the splits {', '.join(dataset)}; give one of them.")
    return itertools.islice(iter(dataset.shuffle(seed=seed)), MOST_ROWS)


def _save_rows(rows: Iterable[dict[str, Any]], folder: Path) -> tuple[str, Sizes]:
    path = folder / TEXT_FILE
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            plain = {name: value for name, value in row.items() if isinstance(value, str | list | dict)}
            file.write(json.dumps(plain, default=str) + "\n")
            number += 1
    if number == 0:
        raise CalibrationError("The calibration text is empty; give some.")
    return str(path), {}


def _save_loader(loader: Iterable[Any], folder: Path, num_sequences: int) -> tuple[str, Sizes]:
    """Write the sequences of batches: strings as text; tokens without their padding, joined and cut again."""
    texts: list[str] = []
    sequences: list[torch.Tensor] = []
    for batch in loader:
        inputs = batch.get("input_ids", batch.get("text")) if isinstance(batch, Mapping) else batch
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], torch.Tensor):
            inputs = inputs[0]
        if isinstance(inputs, torch.Tensor) and inputs.ndim == 2:
            kept = torch.ones_like(inputs) if mask is None else mask
            sequences += [row[keep.bool()] for row, keep in zip(inputs.cpu(), kept.cpu(), strict=True)]
        elif isinstance(inputs, list | tuple) and inputs and all(isinstance(item, str) for item in inputs):
            texts += inputs
        else:
            raise CalibrationError(
                f"A batch of the DataLoader is {reprlib.repr(batch)}; give input_ids (sequences, length), or strings."
            )
        if len(sequences) >= num_sequences:
            break
    if texts:
        return _save_rows(({"text": text} for text in texts), folder)
    if not sequences:
        raise CalibrationError("The DataLoader yields no batches; give one with text.")
    length = max(map(len, sequences))
    joined = torch.cat(sequences[:num_sequences])
    return _save_ids(joined[: len(joined) // length * length].view(-1, length), folder)


def _save_ids(ids: torch.Tensor, folder: Path) -> tuple[str, Sizes]:
    path = folder / TOKEN_FILE
    save_token_ids(ids, path)
    return str(path), {"num_sequences": len(ids), "sequence_length": ids.shape[1]}
