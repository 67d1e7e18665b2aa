"""The journal: all or nothing, what a resumed run finds, and the weight files, also if a run is killed at any step."""

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import Checkpoint, Journal, peek_saved, weight_files
from oneshot.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from oneshot.errors import CheckpointError, OutputError
from oneshot.machine import Workers

Tensors = dict[str, torch.Tensor]
PARTS = [{"a": torch.ones(3), "b": torch.arange(4.0).view(2, 2)}, {"c": torch.full((2,), 3.0)}, {"d": torch.ones(1)}]
# Mixed item sizes: bytes in the order of the parts would leave the int64 tensors at odd places.
MIXED = [
    {"a": torch.ones(3).bfloat16(), "b": torch.arange(5)},
    {"c": torch.ones(1, dtype=torch.int8), "d": torch.randn(7), "e": torch.zeros(0, 4)},
    {},
    {"f": torch.arange(3), "g": torch.randn(3, 3).bfloat16()},
]
THREE_FILES = 44  # bytes; MIXED takes three files of at most as many


def open_journal(folder: Path, parts: list[Tensors] = PARTS, *, max_file_bytes: int = 2**62, **options: Any) -> Journal:
    journal = Journal(folder, **{"fingerprint": {"seed": 0, "options": {"damping": 0.0}}} | options)
    journal.expect(without_values(parts), max_file_bytes=max_file_bytes)
    return journal


def without_values(parts: list[Tensors]) -> list[Tensors]:
    return [{name: tensor.to("meta") for name, tensor in part.items()} for part in parts]


def write(folder: Path, count: int, error: BaseException | None = None, **options: Any) -> None:
    """Add parts up to `count`, then fail, leave or commit."""
    with open_journal(folder, **options) as journal:
        for number in range(journal.num_finished, count):
            journal.add(PARTS[number], record={"number": number}, scaffold=PARTS[0] if number == 1 else None)
        if error is not None:
            raise error
        if count == len(PARTS):
            journal.finish()
            journal.commit()


def write_parts(folder: Path, parts: list[Tensors], **options: Any) -> None:
    """Add the parts that are not finished and commit."""
    with open_journal(folder, parts, **options) as journal:
        for number in range(journal.num_finished, len(parts)):
            journal.add(parts[number])
        journal.finish()
        journal.commit()


def merged(parts: list[Tensors]) -> Tensors:
    return {name: tensor for part in parts for name, tensor in part.items()}


def header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    content = path.read_bytes()
    return dict(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def all_tensors(folder: Path) -> Tensors:
    """Return the tensors of all files, by safetensors' own eager reader."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded = load_file(path)
        assert not tensors.keys() & loaded.keys(), "every tensor is in one file"
        tensors |= loaded
    return tensors


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


# Parts, records and what else is saved


def test_write_and_read_round_trip(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "c": torch.randn(6, 2).T,
        "d": torch.arange(3),
        "e": torch.zeros(0, 4),
    }
    folder = tmp_path / "new" / "out"
    parts = [{name: tensors[name] for name in "ab"}, {name: tensors[name] for name in "cde"}]
    with open_journal(folder, parts) as journal:
        for part in parts:
            journal.add(part)
        journal.finish()
        (journal.partial / "config.json").write_text("{}")
        journal.commit()
    assert names(folder) == ["config.json", SINGLE_NAME]
    assert_same(Checkpoint(folder).read(tensors), tensors)
    assert names(folder.parent) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError(), KeyboardInterrupt(), SystemExit(), OSError(28, "No space left")])
def test_finished_parts_outlive_a_failure_and_the_next_run_continues(error: BaseException, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
        write(folder, 2, error)
    assert names(tmp_path) == ["out.incomplete"], "plainly named"
    with open_journal(folder, resume=True) as journal:
        assert journal.num_finished == 2
        assert journal.records(2) == [{"number": 0}, {"number": 1}]
        for number, scaffold in ((0, {}), (1, PARTS[0])):
            for found, expected in zip(journal.reread(number), (PARTS[number], scaffold), strict=True):
                assert_same(found, expected)
    write(folder, 3, resume=True)
    write(tmp_path / "undisturbed", 3)
    assert names(tmp_path) == ["out", "undisturbed"]
    assert contents(folder) == contents(tmp_path / "undisturbed")


def test_nothing_stays_if_no_part_is_finished_or_the_input_is_at_fault(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", 0, KeyboardInterrupt())
    with pytest.raises(CheckpointError):
        write(tmp_path / "out", 2, CheckpointError("NaN in the third layer."))
    assert names(tmp_path) == []


def test_saved_values_are_found_again_and_keep_the_folder(tmp_path: Path) -> None:
    folder, ranks = tmp_path / "out", {"rank": torch.arange(3.0)}
    assert peek_saved(folder, "plan") is None
    with open_journal(folder) as journal:
        assert journal.saved("plan") is None
        assert journal.saved_tensors("embedding") is None
        journal.save("plan", {"sizes": [1, 2]})
        journal.save_tensors("embedding", ranks)
    assert peek_saved(folder, "plan") == {"sizes": [1, 2]}
    with open_journal(folder, resume=True) as journal:
        assert journal.saved("plan") == {"sizes": [1, 2]}
        saved = journal.saved_tensors("embedding")
        assert saved is not None
        assert_same(saved, ranks)
        assert journal.num_finished == 0
    with open_journal(folder, overwrite=True) as journal:
        assert journal.saved("plan") is None
        assert journal.saved_tensors("embedding") is None


def test_an_interrupted_run_is_neither_forgotten_nor_confused_with_another(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write(folder, 1)
    with pytest.raises(OutputError, match=r"--resume.*--overwrite"):
        open_journal(folder)
    with pytest.raises(OutputError, match=r"another run \(different: damping, seed\)"):
        open_journal(folder, resume=True, fingerprint={"seed": 1, "options": {"damping": 0.1}})
    with open_journal(folder, resume=True) as journal:
        assert journal.num_finished == 1, "the refusals have not touched it"
    with open_journal(folder, overwrite=True) as journal:
        assert journal.num_finished == 0


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    """Also if it lies at a name that a run works under."""
    for name in ("out.incomplete", "out.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious.json").write_text("{}")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(OutputError, match="in the way"):
            open_journal(tmp_path / "out", **options)
    (tmp_path / "out.incomplete").rename(tmp_path / "elsewhere")
    (tmp_path / "out.incomplete").write_text("a file")
    with pytest.raises(OutputError, match="in the way"):
        open_journal(tmp_path / "out")
    (tmp_path / "out.incomplete").unlink()
    write(tmp_path / "out", 3)
    (tmp_path / "out" / "config.json").write_text("{}")
    write(tmp_path / "out", 3, overwrite=True)
    assert (tmp_path / "elsewhere" / "precious.json").exists()
    assert (tmp_path / "out.replaced" / "precious.json").exists()


@pytest.mark.parametrize(
    "names_left", [[], ["lock"], ["lock", "fingerprint.json.unfinished"], ["lock", "fingerprint.json"]]
)
def test_a_run_killed_before_its_first_part_is_not_in_the_way(names_left: list[str], tmp_path: Path) -> None:
    (tmp_path / "out.incomplete" / "checkpoint").mkdir(parents=True)
    for name in names_left:
        (tmp_path / "out.incomplete" / name).write_text("{")
    write(tmp_path / "out", 3)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("damage", ["part", "record", "scaffold", "gone"])
def test_a_damaged_part_is_made_again_and_what_follows_it(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, work = tmp_path / "out", tmp_path / "out.incomplete"
    write(folder, 3 - 1)
    write(folder, 3 - 1, resume=True)
    path = {
        "part": work / "checkpoint" / SINGLE_NAME,
        "record": work / "record-00002.json",
        "scaffold": work / "scaffold-00002.safetensors",
        "gone": work / "scaffold-00002.safetensors",
    }[damage]
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-1])
    with open_journal(folder, resume=True) as journal:
        assert journal.num_finished == 1
    assert (damage == "record") != (f"{path} was damaged" in caplog.text)


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with open_journal(tmp_path / "out") as journal:
        journal.add(PARTS[0])
        with pytest.raises(OutputError, match="Another process"):
            open_journal(tmp_path / "out", overwrite=True)
        assert journal.reread(0)[0].keys() == PARTS[0].keys()


def test_nan_and_inf_are_not_written(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        part = {"model.good": torch.ones(2), "model.bad": torch.tensor([1.0, value])}
        with open_journal(tmp_path / "out", [part]) as journal, pytest.raises(OutputError, match=r"model\.bad"):
            journal.add(part)
        assert journal.num_finished == 0
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"a": torch.ones(3)}, "b was made as nothing but planned as float32 [2, 2]"),
        (PARTS[0] | {"z": torch.ones(1)}, "z was made as float32 [1] but planned as nothing"),
        (PARTS[0] | {"a": torch.ones(4)}, "a was made as float32 [4] but planned as float32 [3]"),
        (PARTS[0] | {"a": torch.ones(3).half()}, "a was made as float16 [3] but planned as float32 [3]"),
    ],
    ids=["missing", "further", "shape", "dtype"],
)
def test_what_was_not_expected_is_not_written(made: Tensors, message: str, tmp_path: Path) -> None:
    with open_journal(tmp_path / "out") as journal, pytest.raises(OutputError, match=re.escape(message)):
        journal.add(made)
    assert names(tmp_path) == []


def test_overwrite_keeps_the_old_folder_until_the_commit(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "old").write_text("old")
    with pytest.raises(OutputError, match="is not a checkpoint"):
        open_journal(folder, overwrite=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="--overwrite"):
        open_journal(folder)
    with pytest.raises(RuntimeError):
        write(folder, 3 - 1, RuntimeError(), overwrite=True)
    assert names(folder) == ["config.json", "old"]
    write(folder, 3, overwrite=True)
    assert names(folder) == [SINGLE_NAME]
    assert load_file(folder / SINGLE_NAME)
    assert names(tmp_path) == ["out"]


def test_an_operating_system_error_while_writing_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"), open_journal(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert names(tmp_path) == []


# The weight files


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


# Killed at every step

CHANGES = (("pwrite", os), ("fsync", os), ("replace", os))


class Killer:
    """Stop before the change `last` of the disk; count the changes if there is no such change.

    Args:
        stop: raises an exception, or ends the process.
    """

    def __init__(self, last: int, stop: Callable[[], None]) -> None:
        self.count, self._last, self._stop = 0, last, stop

    def before(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if self.count == self._last:
                self._stop()
            self.count += 1
            return action(*arguments, **named)

        return run


def write_until(folder: Path, killer: Killer, max_file_bytes: int) -> None:
    """Write MIXED up to the commit; before each change of the disk the killer may stop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "THREADS", 1)  # the changes have an order
        patch.setattr(weight_files, "CHUNK_BYTES", 8)
        with open_journal(folder, MIXED, max_file_bytes=max_file_bytes, resume=True) as journal:
            for name, module in CHANGES:
                patch.setattr(module, name, killer.before(getattr(module, name)))
            for number in range(journal.num_finished, len(MIXED)):
                journal.add(MIXED[number], record={"number": number}, scaffold=PARTS[0] if number == 1 else None)
            journal.finish()
            killer.before(lambda: None)()  # before the commit


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count_steps(folder: Path, max_file_bytes: int) -> int:
    killer = Killer(-1, interrupt)
    write_until(folder, killer, max_file_bytes)
    return killer.count


def finished_records(work: Path) -> int:
    return len(list(work.glob("record-*.json")))


def check_continues(tmp_path: Path, max_file_bytes: int) -> None:
    """Continue the killed run: no part with a record is made again, and the bytes are those of an undisturbed run."""
    folder, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    assert not folder.exists()
    with open_journal(folder, MIXED, max_file_bytes=max_file_bytes, resume=True) as journal:
        assert journal.num_finished == finished_records(tmp_path / "out.incomplete")
        assert journal.records(journal.num_finished) == [{"number": number} for number in range(journal.num_finished)]
        for number in range(journal.num_finished):
            tensors, scaffold = journal.reread(number)
            assert_same(tensors, MIXED[number])
            assert_same(scaffold, PARTS[0] if number == 1 else {})
        for number in range(journal.num_finished, len(MIXED)):
            journal.add(MIXED[number])
        journal.finish()
        assert not list(journal.partial.glob("*.unfinished"))
        journal.commit()
    write_parts(undisturbed, MIXED, max_file_bytes=max_file_bytes)
    assert names(tmp_path) == ["out", "undisturbed"]
    assert contents(folder) == contents(undisturbed)


@pytest.mark.parametrize("max_file_bytes", [2**62, THREE_FILES])
def test_a_run_interrupted_at_any_change_of_the_disk_is_continued(max_file_bytes: int, tmp_path: Path) -> None:
    num_steps = count_steps(tmp_path / "counted" / "out", max_file_bytes)
    assert num_steps > 30
    for last in range(num_steps):
        own = tmp_path / str(last)
        with pytest.raises(KeyboardInterrupt):
            write_until(own / "out", Killer(last, interrupt), max_file_bytes)
        check_continues(own, max_file_bytes)


@pytest.mark.parametrize("max_file_bytes", [2**62, THREE_FILES])
def test_a_run_killed_at_any_change_of_the_disk_is_continued(max_file_bytes: int, tmp_path: Path) -> None:
    """A process that ends at once leaves its lock and cleans nothing."""
    num_steps = count_steps(tmp_path / "counted" / "out", max_file_bytes)
    for last in range(num_steps):
        own = tmp_path / str(last)
        child = os.fork()
        if child == 0:
            try:
                write_until(own / "out", Killer(last, kill), max_file_bytes)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        check_continues(own, max_file_bytes)


def test_a_run_interrupted_many_times_is_continued(tmp_path: Path) -> None:
    for last in (9, 14, 9, 9, 5, 3, 1):
        with pytest.raises(KeyboardInterrupt):
            write_until(tmp_path / "out", Killer(last, interrupt), THREE_FILES)
    check_continues(tmp_path, THREE_FILES)


@pytest.mark.parametrize("finished", [1, 2, 4])
def test_a_power_cut_that_lost_bytes_with_a_record_is_noticed(finished: int, tmp_path: Path) -> None:
    """Files that are shorter or have zeros where tensors were: a disk that did not keep what was flushed."""
    for damage in ("zeros", "short", "none"):
        own = tmp_path / damage
        with open_journal(own / "out", MIXED) as journal:
            for number in range(finished):
                journal.add(MIXED[number], record={"number": number})
        path = own / "out.incomplete" / "checkpoint" / SINGLE_NAME
        content = path.read_bytes()
        path.write_bytes({"zeros": bytes(len(content)), "short": content[:-1], "none": content}[damage])
        with open_journal(own / "out", MIXED, resume=True) as journal:
            assert (journal.num_finished == finished) == (damage == "none")
        write_parts(own / "out", MIXED, resume=True)
        write_parts(own / "undisturbed", MIXED)
        assert contents(own / "out") == contents(own / "undisturbed")


@pytest.mark.parametrize("place", range(6))
def test_a_turned_bit_is_found_wherever_it_is(place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Parts up to the damaged one are kept; a part after it, which is good, is made again to the same bytes."""
    folder = tmp_path / "out"
    with open_journal(folder, MIXED) as journal:
        for number, part in enumerate(MIXED):
            journal.add(part, record={"number": number})
        damaged = [place for place in journal.stored() if place.num_bytes][place]
    content = bytearray(damaged.path.read_bytes())
    content[damaged.start + (damaged.num_bytes - 1) * (place % 2)] ^= 1
    damaged.path.write_bytes(content)
    with open_journal(folder, MIXED, resume=True) as journal:
        assert journal.num_finished == next(number for number, part in enumerate(MIXED) if damaged.name in part)
    assert f"{damaged.path} was damaged after it was written" in caplog.text
    write_parts(folder, MIXED, resume=True)
    write_parts(tmp_path / "undisturbed", MIXED)
    assert contents(folder) == contents(tmp_path / "undisturbed")


def test_a_file_that_is_shortened_before_the_end_is_an_output_error(tmp_path: Path) -> None:
    path = tmp_path / "out.incomplete" / "checkpoint" / SINGLE_NAME

    def damage_and_finish() -> None:
        with open_journal(tmp_path / "out") as journal:
            for tensors in PARTS:
                journal.add(tensors)
            path.write_bytes(path.read_bytes()[:-1])
            journal.finish()

    with pytest.raises(OutputError, match=r"model\.safetensors ended early"):
        damage_and_finish()
    assert names(tmp_path) == ["out.incomplete"]
    with open_journal(tmp_path / "out", resume=True) as journal:
        assert journal.num_finished == 2, "the damaged part is made again"


def test_a_disk_that_fills_up_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every write, of a tensor, of a record and of a header; a full disk first takes some of the bytes."""
    pwrite, room = os.pwrite, 0

    def fill(file: int, data: memoryview, start: int) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        taken = min(room, len(data))
        room -= taken
        return pwrite(file, data[:taken], start)

    write(tmp_path / "undisturbed", 3)
    num_bytes = (tmp_path / "undisturbed" / SINGLE_NAME).stat().st_size
    for room_at_first in (0, 1, 13, 28, 33, num_bytes - 1):
        room, folder = room_at_first, tmp_path / str(room_at_first) / "out"
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fill)
            with pytest.raises(OutputError, match=rf"{folder} cannot be written \(No space left on device\)"):
                write(folder, 3)
        assert not folder.exists()
        write(folder, 3, resume=True)
        assert contents(folder) == contents(tmp_path / "undisturbed")


# Several processes


@dataclass(frozen=True)
class Told(Workers):
    """A process that shares through a list: the main one fills it, the others read it."""

    told: list[Any] = field(default_factory=list)

    def share(self, task: int, compute: Callable[[], Any]) -> Any:
        if not self.owns(task):
            return self.told.pop(0)
        value = compute()
        self.told.append(value)
        return value


@contextmanager
def watched_disk() -> Iterator[list[str]]:
    """Yield the names of all operations on files that Python reports within the block."""
    seen: list[str] = []
    watching = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and (event == "open" or event.startswith(("os.", "shutil.", "pathlib."))):
            seen.append(f"{event} {arguments}")

    sys.addaudithook(note)  # it cannot be removed, only be told to be silent
    yield seen
    watching = False


def run_shared(folder: Path, workers: Workers) -> list[Any]:
    """Use everything that a journal has; return what the process learns."""
    with open_journal(folder, workers=workers) as journal:
        learnt: list[Any] = [journal.num_finished, journal.saved("plan"), journal.saved_tensors("embedding")]
        journal.save("plan", {"sizes": [1, 2]})
        journal.save_tensors("embedding", PARTS[1])
        learnt += [journal.saved("plan"), journal.saved_tensors("embedding")]
        for number, part in enumerate(PARTS):
            journal.add(part, record={"number": number}, scaffold=PARTS[0])
        learnt += [journal.num_finished, journal.records(3), journal.reread(1)]
        journal.finish()
        journal.commit()
        return learnt


def test_only_the_main_process_touches_the_disk(tmp_path: Path) -> None:
    told: list[Any] = []
    by_main = run_shared(tmp_path / "main" / "out", Told(rank=0, size=2, told=told))
    assert names(tmp_path / "main") == ["out"]
    with watched_disk() as seen:
        by_other = run_shared(tmp_path / "other" / "out", Told(rank=1, size=2, told=told))
    assert seen == []
    assert names(tmp_path) == ["main"]
    assert told == [], "all that was told was heard"
    assert by_other == by_main


def test_the_watch_of_the_disk_sees_the_main_process(tmp_path: Path) -> None:
    """The test above would pass on a watch that sees nothing."""
    with watched_disk() as seen:
        run_shared(tmp_path / "out", Told(rank=0, size=2))
    assert any(event.startswith("os.mkdir") for event in seen)
    assert any(event.startswith("open") for event in seen)


def test_a_failure_in_another_process_leaves_the_disk_alone(tmp_path: Path) -> None:

    def fail(workers: Workers) -> None:
        with open_journal(tmp_path / "out", workers=workers) as journal:
            assert journal.num_finished == 2, "as the main process has found"
            raise CheckpointError("NaN in the third layer.")

    with watched_disk() as seen, pytest.raises(CheckpointError, match="third layer"):
        fail(Told(rank=1, size=2, told=[2]))
    assert seen == []
    assert names(tmp_path) == []
