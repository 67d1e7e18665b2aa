"""Rows of token ids, from files and from memory: only text is read, however the rows are filled up."""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
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


@pytest.fixture
def counted() -> tuple[Callable[[list[int]], Iterator[list[int]]], list[int]]:
    """Rows without an end whose lengths take turns, and the lengths of the rows that were asked for."""
    asked: list[int] = []

    def rows(lengths: list[int]) -> Iterator[list[int]]:
        for number, length in enumerate(itertools.cycle(lengths)):
            asked.append(length)
            yield [10 + number % 300] * length

    return rows, asked


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Rows for a `DataLoader`."""

    def __init__(self, rows: Iterator[list[int]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"input_ids": torch.tensor(row)} for row in self._rows)


LAZY: dict[str, Callable[[Iterator[list[int]]], Any]] = {
    "rows": lambda rows: ({"input_ids": row} for row in rows),
    "loader": lambda rows: torch.utils.data.DataLoader(Stream(rows), batch_size=1),
}
WHOLE: dict[str, Callable[[list[list[int]]], Any]] = {
    "lists": lambda rows: rows,
    "rows": lambda rows: [{"input_ids": row} for row in rows],
    "data set": lambda rows: data_set({"input_ids": rows}),
    "streamed data set": lambda rows: data_set({"input_ids": rows}).to_iterable_dataset(),
    "loader": lambda rows: torch.utils.data.DataLoader([{"input_ids": torch.tensor(row)} for row in rows]),  # type: ignore[arg-type]
}
LENGTHS = [[3], [7, 8], [2, 9, 5], [8], [30], [30, 1]]


@pytest.mark.parametrize("length", [8, None])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("container", WHOLE)
def test_rows_of_any_length_give_the_sequences_asked_for(
    container: str, lengths: list[int], length: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And no warning says that the text is too short, because it is not."""
    rows = [[10] * one for _, one in zip(range(90), itertools.cycle(lengths), strict=False)]
    source, sizes = save_text(WHOLE[container](rows), tmp_path, num_sequences=6, seed=0, sequence_length=length)
    wanted = sizes["sequence_length"]
    assert wanted == (length or max(lengths))
    found = load_token_ids(source, num_sequences=6, sequence_length=wanted, seed=0)
    assert found.token_ids.shape == (6, wanted)
    if container != "lists":  # which are read whole
        assert sizes["num_sequences"] == 6
    assert load_token_ids(source, **sizes, seed=0, fillings={}).num_sequences == sizes["num_sequences"]
    assert not caplog.records


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("container", LAZY)
def test_no_more_rows_are_asked_for_than_make_the_sequences(
    container: str, lengths: list[int], counted: Any, tmp_path: Path
) -> None:
    rows, asked = counted
    save_text(LAZY[container](rows(lengths)), tmp_path, num_sequences=6, seed=0, sequence_length=8)

    def sequences(read: list[int]) -> int:
        return len(read) if set(read) in ({8}, {30}) else sum(read) // 8

    assert sequences(asked) >= 6 > sequences(asked[:-1])


def test_short_rows_of_one_length_are_joined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As rows of several lengths are; only less than a sequence is refused, with what there is."""
    ids = torch.arange(10, 46).view(9, 4)
    source, sizes = save_text(ids, tmp_path, num_sequences=99, seed=0, sequence_length=12)
    assert sizes == {"num_sequences": 3, "sequence_length": 12}
    found = load_token_ids(source, **sizes, seed=0, fillings={}).token_ids
    assert sorted(found.tolist()) == ids.view(3, 12).tolist()
    assert not caplog.records
    _, sizes = save_text(ids, tmp_path, num_sequences=99, seed=0, sequence_length=37)
    with pytest.raises(CalibrationError, match="holds 36 tokens, less than one sequence of 37; give more text or"):
        load_token_ids(source, **sizes, seed=0, fillings={})


def test_rows_that_are_full_are_cut_as_they_are(padded: Any, tmp_path: Path) -> None:
    """Each gives one window, also with a mask of ones."""
    ids = torch.arange(10, 34).view(2, 12)
    for columns in ({"input_ids": ids}, {"input_ids": ids.int(), "attention_mask": torch.ones_like(ids)}):
        save_file(columns, tmp_path / "a.safetensors")
        found = read(str(tmp_path / "a.safetensors"), padded, 8)
        assert sorted(found.tolist()) == ids[:, :8].tolist()
