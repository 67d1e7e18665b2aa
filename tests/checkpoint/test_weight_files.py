"""The weight files of a result: one or several, as the library writes them, each byte written once."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from journals import (
    MIXED,
    PARTS,
    THREE_FILES,
    all_tensors,
    assert_same,
    merged,
    names,
    open_journal,
    without_values,
    write_parts,
)
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import Checkpoint, Journal
from oneshot.checkpoint.reader import INDEX_NAME, SINGLE_NAME


def header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    content = path.read_bytes()
    return dict(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))


def test_a_small_result_is_one_file_without_an_index(tmp_path: Path) -> None:
    write_parts(tmp_path / "out", MIXED)
    assert names(tmp_path / "out") == [SINGLE_NAME]
    assert_same(load_file(tmp_path / "out" / SINGLE_NAME), merged(MIXED))


def test_a_large_result_is_numbered_files_with_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_parts(folder, MIXED, max_file_bytes=THREE_FILES)
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert names(folder) == [*files, INDEX_NAME]
    index = json.loads((folder / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in merged(MIXED).values())}
    assert index["weight_map"] == {name: file for file in files for name in load_file(folder / file)}
    assert_same(all_tensors(folder), merged(MIXED))


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@st.composite
def tensors_of_any_size(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    values = torch.arange(math.prod(shape)).view(shape) % 2 + draw(st.integers(0, 1))
    return values.to(dtype)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.lists(tensors_of_any_size(), max_size=4), min_size=1, max_size=5),
    max_file_bytes=st.sampled_from([1, 8, 60, 200, 2**62]),
)
def test_files_hold_what_was_added(
    sizes: list[list[torch.Tensor]], max_file_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files") / "out"
    parts = [{f"{number}.{index}": t for index, t in enumerate(part)} for number, part in enumerate(sizes)]
    expected = merged(parts)
    write_parts(folder, parts, max_file_bytes=max_file_bytes)
    assert_same(all_tensors(folder), expected)
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        stored = {name: entry for name, entry in header(path).items() if name != "__metadata__"}
        data = path.stat().st_size - max((entry["data_offsets"][1] for entry in stored.values()), default=0)
        assert all((data + entry["data_offsets"][0]) % expected[name].itemsize == 0 for name, entry in stored.items())
        assert sum(expected[name].nbytes for name in stored) <= max_file_bytes or len(stored) == 1
    assert (folder / INDEX_NAME).exists() == (len(files) > 1)
    if len(files) > 1:
        weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
        assert weight_map == {name: path.name for path in files for name in load_file(path)}
    if expected:
        (folder / "config.json").write_text("{}")
        assert Checkpoint(folder).shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=st.lists(tensors_of_any_size(), max_size=6))
def test_one_part_has_the_bytes_of_the_library(
    tensors: list[torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With dtypes of one width; between widths the library's order of dtypes is not by width everywhere."""
    folder = tmp_path_factory.mktemp("library")
    part = {f"{index}": tensor for index, tensor in enumerate(tensors) if tensor.itemsize == tensors[0].itemsize}
    write_parts(folder / "out", [part])
    save_file(part, folder / SINGLE_NAME, metadata={"format": "pt"})
    if part:
        assert (folder / "out" / SINGLE_NAME).read_bytes() == (folder / SINGLE_NAME).read_bytes()


def test_a_part_is_written_once_and_not_read(tmp_path: Path) -> None:
    """`/proc/self/io` counts what was read and written; beside the tensors there are records and headers only."""

    def moved() -> tuple[int, int]:
        lines = Path("/proc/self/io").read_text().split()
        return int(lines[lines.index("rchar:") + 1]), int(lines[lines.index("wchar:") + 1])

    parts = [{f"{number}": torch.randn(2**20)} for number in range(3)]  # 4 MiB each
    num_bytes = sum(tensor.nbytes for tensor in merged(parts).values())
    before = moved()
    write_parts(tmp_path / "out", parts)
    read, written = (now - then for now, then in zip(moved(), before, strict=True))
    assert num_bytes <= written < num_bytes + 2**16
    assert read < 2**16
    assert_same(all_tensors(tmp_path / "out"), merged(parts))


def test_a_run_with_another_layout_leaves_no_files_of_the_first(tmp_path: Path) -> None:
    with open_journal(tmp_path / "out", MIXED, max_file_bytes=THREE_FILES) as journal:
        for part in MIXED:
            journal.add(part)
        journal.finish()
    with open_journal(tmp_path / "out", PARTS, resume=True) as journal:
        assert journal.num_finished == 0
        for part in PARTS:
            journal.add(part)
        journal.finish()
        journal.commit()
    assert names(tmp_path / "out") == [SINGLE_NAME]
    assert_same(load_file(tmp_path / "out" / SINGLE_NAME), merged(PARTS))


def test_tensors_of_a_part_are_listed_as_the_library_orders_them(tmp_path: Path) -> None:
    with open_journal(tmp_path / "out", MIXED) as journal:
        listed = [place.name for place in journal.stored()]
    for number, part in enumerate(MIXED):
        save_file(part, tmp_path / f"{number}.safetensors")
        entries = {name: entry for name, entry in header(tmp_path / f"{number}.safetensors").items() if name in part}
        by_place = sorted(entries, key=lambda name: entries[name]["data_offsets"])
        assert [name for name in listed if name in part] == by_place


def test_files_beside_the_result_are_no_part_of_it(tmp_path: Path) -> None:
    """For a form with a file of its own, made of the tensors at their places."""
    with Journal(tmp_path / "out", fingerprint={}) as journal:
        journal.expect(without_values(PARTS), direct=False, max_file_bytes=20)
        for part in PARTS:
            journal.add(part)
        assert [place.name for place in journal.stored()] == list(merged(PARTS))
        for place in journal.stored():
            with place.path.open("rb") as file:
                file.seek(place.start)
                assert file.read(place.num_bytes) == merged(PARTS)[place.name].numpy().tobytes()
        (journal.partial / "config.json").write_text("{}")
        journal.commit()
    assert names(tmp_path / "out") == ["config.json"]
    assert names(tmp_path) == ["out"]
