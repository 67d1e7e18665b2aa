"""Rows of token ids, from files and from memory: only text is read, however the rows are filled up."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from oneshot.api.texts import save_text
from oneshot.errors import CalibrationError
from oneshot.text import ChatRenderer, fillings_of, iter_documents, load_text, load_token_ids
from oneshot.text.token_rows import text_tokens

PAD, END, LENGTH = 2, 1, 12
REAL = [list(range(10, 10 + count)) for count in (12, 7, 9, 4)]


def left(row: list[int], width: int) -> list[int]:
    return [0] * width + [1] * len(row)


def right(row: list[int], width: int) -> list[int]:
    return [1] * len(row) + [0] * width


def holes(row: list[int], width: int) -> list[int]:
    return [1, *[0] * width, *[1] * (len(row) - 1)]


Rows = dict[str, list[list[int]]]


def filled(place: Callable[[list[int], int], list[int]]) -> Rows:
    """Return the rows, filled up to one length, and their mask."""
    masks = [place(row, LENGTH - len(row)) for row in REAL]
    ids = []
    for row, mask in zip(REAL, masks, strict=True):
        tokens = iter(row)
        ids.append([next(tokens) if keep else PAD for keep in mask])
    return {"input_ids": ids, "attention_mask": masks}


def tensors(rows: Rows) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in rows.items()}


def as_safetensors(rows: Rows, folder: Path) -> str:
    save_file(tensors(rows), folder / "a.safetensors")
    return str(folder / "a.safetensors")


def records(rows: Rows) -> list[dict[str, Any]]:
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def as_lines(rows: Rows, folder: Path) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records(rows)))
    return str(folder / "a.jsonl")


def as_parquet(rows: Rows, folder: Path) -> str:
    from datasets import Dataset

    Dataset.from_dict(rows).to_parquet(folder / "a.parquet")
    return str(folder / "a.parquet")


def in_memory(given: Callable[[Rows], Any]) -> Callable[[Rows, Path], str]:
    return lambda rows, folder: save_text(given(rows), folder, num_sequences=9, seed=0)[0]


def data_set(rows: Rows) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(rows)


def loader(rows: Rows) -> Any:
    examples = [dict(zip(rows, values, strict=True)) for values in zip(*tensors(rows).values(), strict=True)]
    return torch.utils.data.DataLoader(examples, batch_size=3)  # type: ignore[arg-type]


CONTAINERS: dict[str, Callable[[Rows, Path], str]] = {
    "safetensors": as_safetensors,
    "lines": as_lines,
    "parquet": as_parquet,
    "rows in memory": in_memory(records),
    "batch": in_memory(tensors),
    "data set": in_memory(data_set),
    "torch data set": in_memory(lambda rows: data_set(rows).with_format("torch")),
    "loader": in_memory(loader),
}


@pytest.fixture
def padded(tokenizer: Any) -> Any:
    """A tokenizer that puts nothing before texts, and pads."""
    own = copy.deepcopy(tokenizer)
    own.pad_token = own.convert_ids_to_tokens(PAD)
    assert (own.pad_token_id, own.eos_token_id) == (PAD, END)
    return own


def read(source: str, tokenizer: Any, length: int) -> torch.Tensor:
    options = {"num_sequences": 99, "sequence_length": length, "seed": 0}
    if source.endswith("safetensors"):
        return load_token_ids(source, **options, fillings=fillings_of(tokenizer)).token_ids
    return load_text(source, tokenizer, **options).token_ids


@pytest.mark.parametrize("place", [left, right, holes])
@pytest.mark.parametrize("container", CONTAINERS)
def test_what_fills_rows_up_is_never_text(
    container: str, place: Callable[[list[int], int], list[int]], padded: Any, tmp_path: Path
) -> None:
    """All 32 tokens of text are in the four windows of 8, and nothing else."""
    found = read(CONTAINERS[container](filled(place), tmp_path), padded, 8)
    assert sorted(found.flatten().tolist()) == sorted(token for row in REAL for token in row)


@pytest.mark.parametrize("place", [left, right])
@pytest.mark.parametrize("container", ["safetensors", "lines", "parquet"])
def test_without_a_mask_the_padding_token_tells(
    container: str, place: Callable[[list[int], int], list[int]], padded: Any, tmp_path: Path
) -> None:
    rows = {"input_ids": filled(place)["input_ids"]}
    found = read(CONTAINERS[container](rows, tmp_path), padded, 8)
    assert PAD not in found
    assert found.shape == (4, 8)


def test_one_end_of_a_text_is_not_padding() -> None:
    """A token that both ends and fills up stays once; labels tell of padding that no tokenizer states."""
    ends = {END: 2}
    for ids, wanted in (
        ([5, 6, END], [5, 6, END]),
        ([5, 6, END, END, END], [5, 6, END]),
        ([END, END, 5, END, END, 6], [END, 5, END, END, 6]),
        ([END, END, END], [END]),
        ([PAD, 5, PAD], [PAD, 5, PAD]),
    ):
        assert text_tokens({"input_ids": ids}, "a", ends).tolist() == wanted
    assert text_tokens({"input_ids": [PAD, 5, PAD], "labels": None}, "a", {PAD: 1}).tolist() == [5]
    labelled = {"input_ids": [7, 8, 5, 9, 9], "labels": [-100, -100, 5, -100, -100]}
    assert text_tokens(labelled, "a", {}).tolist() == [7, 8, 5]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 6], "attention_mask": [1]}, "does not fit its input_ids; give 1 for"),
        ({"input_ids": [5, 6], "attention_mask": [0.0, -1e9]}, "does not fit its input_ids"),
        ({"input_ids": [5, 6], "padding_mask": [1, 0]}, "a column padding_mask; name it attention_mask"),
        ({"input_ids": [5.5, 6]}, r"input_ids as torch.float32 of shape \(2,\)"),
        ({"input_ids": [[5], [6]]}, r"of shape \(2, 1\)"),
        ({"input_ids": ["a"]}, r"holds \['a'\] where input_ids should be"),
        ({"input_ids": [5, -100]}, "negative token -100"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused(
    row: dict[str, Any], message: str, padded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or left out, if it is one row of many."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(CalibrationError, match=message):
        list(iter_documents(str(path), 0, ChatRenderer(padded)))
    path.write_text("".join(json.dumps(each) + "\n" for each in (row, {"input_ids": [5]}, {"input_ids": [6]})))
    assert sorted(iter_documents(str(path), 0, ChatRenderer(padded))) == [[5], [6]]
    assert "1 of 3 records" in caplog.text
    with pytest.raises(CalibrationError, match="tokens, which only models that write text read"):
        list(iter_documents(str(path), 0))


def test_rows_of_several_lengths_give_sequences_of_the_usual_length(tmp_path: Path) -> None:
    """At most; rows of one length are taken as they are."""
    for lengths, wanted in (((5, 3), (1, 5)), ((5000, 3000), (7, 1024)), ((3000, 3000), (2, 3000))):
        _, sizes = save_text([[1] * length for length in lengths], tmp_path, num_sequences=9, seed=0)
        assert (sizes["num_sequences"], sizes["sequence_length"]) == wanted


def test_rows_that_are_full_are_cut_as_they_are(padded: Any, tmp_path: Path) -> None:
    """Each gives one window, also with a mask of ones."""
    ids = torch.arange(10, 34).view(2, 12)
    for columns in ({"input_ids": ids}, {"input_ids": ids.int(), "attention_mask": torch.ones_like(ids)}):
        save_file(columns, tmp_path / "a.safetensors")
        found = read(str(tmp_path / "a.safetensors"), padded, 8)
        assert sorted(found.tolist()) == ids[:, :8].tolist()
