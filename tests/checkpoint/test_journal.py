"""The journal: all or nothing, what a resumed run finds, and the join of the parts, also if it is killed."""

import json
import math
import os
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from oneshot.checkpoint import Checkpoint, Journal, peek_saved, weight_files
from oneshot.checkpoint import journal as journal_module
from oneshot.checkpoint.join import ITEM_BYTES, stored_tensors
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


def open_journal(folder: Path, **options: Any) -> Journal:
    return Journal(folder, **{"num_parts": 3, "fingerprint": {"seed": 0, "options": {"damping": 0.0}}} | options)


def write(folder: Path, count: int, error: BaseException | None = None, **options: Any) -> None:
    """Add parts up to `count`, then fail, leave or commit."""
    with open_journal(folder, **options) as journal:
        for number in range(journal.num_finished, count):
            journal.add(PARTS[number], record={"number": number}, scaffold=PARTS[0] if number == 1 else None)
        if error is not None:
            raise error
        if count == len(PARTS):
            journal.join()
            journal.commit()


def write_parts(
    folder: Path, parts: list[Tensors], *, advance: Callable[[int], None] = lambda num_bytes: None, **options: Any
) -> None:
    """Add the parts that are not finished, join them and commit."""
    with open_journal(folder, num_parts=len(parts), **options) as journal:
        for number in range(journal.num_finished, len(parts)):
            journal.add(parts[number])
        journal.join(advance)
        journal.commit()


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
    with open_journal(folder, num_parts=2) as journal:
        journal.add({name: tensors[name] for name in "ab"})
        journal.add({name: tensors[name] for name in "cde"})
        journal.join()
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


@pytest.mark.parametrize("damage", ["part", "record", "scaffold"])
def test_a_damaged_part_is_made_again_and_what_follows_it(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, work = tmp_path / "out", tmp_path / "out.incomplete"
    write(folder, 3 - 1)
    write(folder, 3 - 1, resume=True)
    path = {
        "part": work / "part-00002.safetensors",
        "record": work / "record-00002.json",
        "scaffold": work / "scaffold-00002.safetensors",
    }[damage]
    path.write_bytes(path.read_bytes()[:-1])
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
        with open_journal(tmp_path / "out") as journal, pytest.raises(OutputError, match=r"model\.bad"):
            journal.add({"model.good": torch.ones(2), "model.bad": torch.tensor([1.0, value])})
        assert journal.num_finished == 0
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


# The join


def test_a_small_result_is_one_file_without_an_index(tmp_path: Path) -> None:
    counted: list[int] = []
    write_parts(tmp_path / "out", MIXED, advance=counted.append)
    expected = {name: tensor for part in MIXED for name, tensor in part.items()}
    assert names(tmp_path / "out") == [SINGLE_NAME]
    assert_same(load_file(tmp_path / "out" / SINGLE_NAME), expected)
    assert sum(counted) == sum(tensor.nbytes for tensor in expected.values())


def test_a_large_result_is_numbered_files_with_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    expected = {name: tensor for part in MIXED for name, tensor in part.items()}
    write_parts(folder, MIXED, max_file_bytes=THREE_FILES)
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert names(folder) == [*files, INDEX_NAME]
    index = json.loads((folder / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in expected.values())}
    assert index["weight_map"] == {name: file for file in files for name in load_file(folder / file)}
    assert_same(all_tensors(folder), expected)


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
def test_joined_files_hold_what_was_added(
    sizes: list[list[torch.Tensor]], max_file_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("join") / "out"
    parts = [{f"{number}.{index}": t for index, t in enumerate(part)} for number, part in enumerate(sizes)]
    expected = {name: tensor for part in parts for name, tensor in part.items()}
    write_parts(folder, parts, max_file_bytes=max_file_bytes)
    assert_same(all_tensors(folder), expected)
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        stored = stored_tensors(path)
        assert all(tensor.start % ITEM_BYTES.get(tensor.dtype, 1) == 0 for tensor in stored), "items are aligned"
        assert sum(tensor.num_bytes for tensor in stored) <= max_file_bytes or len(stored) == 1
    assert (folder / INDEX_NAME).exists() == (len(files) > 1)
    if len(files) > 1:
        weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
        assert weight_map == {tensor.name: path.name for path in files for tensor in stored_tensors(path)}
    if expected:
        (folder / "config.json").write_text("{}")
        assert Checkpoint(folder).shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}


def test_int64_and_bfloat16_in_one_file_are_aligned(tmp_path: Path) -> None:
    write_parts(tmp_path / "out", MIXED)
    dtypes = [tensor.dtype for tensor in stored_tensors(tmp_path / "out" / SINGLE_NAME)]
    assert {"I64", "F32", "BF16", "I8"} == set(dtypes)
    for tensor in stored_tensors(tmp_path / "out" / SINGLE_NAME):
        assert tensor.start % ITEM_BYTES.get(tensor.dtype, 1) == 0, tensor.name


def test_the_join_loads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is a piece of a file, however large the tensors are."""
    monkeypatch.setattr("oneshot.checkpoint.join.CHUNK_BYTES", 2**16)
    parts = [{f"{number}": torch.randn(2**20)} for number in range(3)]  # 4 MiB each
    with open_journal(tmp_path / "out") as journal:
        for part in parts:
            journal.add(part)

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a tensor is loaded")

        with monkeypatch.context() as patch:
            for name in ("load_file", "save_file"):
                patch.setattr(journal_module, name, refuse)
            for name in ("tensor", "empty", "zeros", "frombuffer", "from_numpy"):
                patch.setattr(torch, name, refuse)
            tracemalloc.start()
            journal.join()
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 2**20
        journal.commit()
    assert_same(all_tensors(tmp_path / "out"), {name: tensor for part in parts for name, tensor in part.items()})


def test_parts_are_removed_as_their_bytes_are_joined(tmp_path: Path) -> None:
    """So the disk holds the result and one more file at most."""
    work = tmp_path / "out.incomplete"
    left: list[list[str]] = []
    with open_journal(tmp_path / "out", num_parts=3, max_file_bytes=1) as journal:
        for number in range(3):
            journal.add({f"{number}": torch.ones(4)})
        journal.join(lambda _: left.append([path.name for path in sorted(work.glob("part-*"))]))
        assert not list(work.glob("part-*"))
        journal.commit()
    parts = [f"part-0000{number}.safetensors" for number in (1, 2, 3)]
    assert left == [parts, parts[1:], parts[2:]]


# The join, killed at every step

STEPS = ("write_joined", "make_durable", "write_whole")


class Killer:
    """Stop before the step `last`; count the steps if there is no such step.

    Args:
        stop: raises an exception, or ends the process.
    """

    def __init__(self, last: int, stop: Callable[[], None]) -> None:
        self.count, self._last, self._stop = 0, last, stop

    def step(self, *_: Any) -> None:
        if self.count == self._last:
            self._stop()
        self.count += 1

    def before(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self.step()
            return action(*arguments, **named)

        return run


def join_until(folder: Path, killer: Killer, max_file_bytes: int) -> None:
    """Add MIXED and join it; before each change of the disk, and between the chunks of a file, the killer may stop."""
    options = {"num_parts": len(MIXED), "max_file_bytes": max_file_bytes}
    with open_journal(folder, **options, resume=True) as journal, pytest.MonkeyPatch.context() as patch:
        for number in range(journal.num_finished, len(MIXED)):
            journal.add(MIXED[number])
        for name in STEPS:
            patch.setattr(weight_files, name, killer.before(getattr(weight_files, name)))
        for module, name in ((os, "replace"), (Path, "unlink"), (os, "fsync")):
            patch.setattr(module, name, killer.before(getattr(module, name)))
        journal.join(killer.step)
        killer.step()  # after the join and before the commit


def interrupt() -> None:
    raise KeyboardInterrupt


def count_steps(folder: Path, max_file_bytes: int) -> int:
    killer = Killer(-1, interrupt)
    join_until(folder, killer, max_file_bytes)
    return killer.count


def check_continues(tmp_path: Path, max_file_bytes: int) -> None:
    """Continue the killed run; no part is made again, and the bytes are those of an undisturbed run."""
    folder, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    assert names(tmp_path) == ["out.incomplete"]
    with open_journal(folder, num_parts=len(MIXED), max_file_bytes=max_file_bytes, resume=True) as journal:
        assert journal.num_finished == len(MIXED)
        journal.join()
        assert not list(journal.partial.glob("*.unfinished"))
        journal.commit()
    write_parts(undisturbed, MIXED, max_file_bytes=max_file_bytes)
    assert names(tmp_path) == ["out", "undisturbed"]
    assert contents(folder) == contents(undisturbed)


@pytest.mark.parametrize("max_file_bytes", [2**62, THREE_FILES])
def test_a_join_interrupted_at_any_step_is_continued(max_file_bytes: int, tmp_path: Path) -> None:
    num_steps = count_steps(tmp_path / "counted" / "out", max_file_bytes)
    assert num_steps > 15
    for last in range(num_steps):
        own = tmp_path / str(last)
        with pytest.raises(KeyboardInterrupt):
            join_until(own / "out", Killer(last, interrupt), max_file_bytes)
        check_continues(own, max_file_bytes)


@pytest.mark.parametrize("max_file_bytes", [2**62, THREE_FILES])
def test_a_join_killed_at_any_step_is_continued(max_file_bytes: int, tmp_path: Path) -> None:
    """A process that ends at once leaves its lock and cleans nothing."""
    num_steps = count_steps(tmp_path / "counted" / "out", max_file_bytes)
    for last in range(num_steps):
        own = tmp_path / str(last)
        child = os.fork()
        if child == 0:
            try:
                join_until(own / "out", Killer(last, lambda: os.kill(os.getpid(), signal.SIGKILL)), max_file_bytes)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        check_continues(own, max_file_bytes)


def test_a_join_interrupted_many_times_is_continued(tmp_path: Path) -> None:
    """Every attempt gets one step further than a whole file, and the last one is undisturbed."""
    for last in (3, 5, 9, 9, 9):
        with pytest.raises(KeyboardInterrupt):
            join_until(tmp_path / "out", Killer(last, interrupt), THREE_FILES)
    check_continues(tmp_path, THREE_FILES)


@pytest.mark.parametrize("damage", ["flipped", "shortened", "removed"])
@pytest.mark.parametrize(("max_file_bytes", "number"), [(2**62, 1), (THREE_FILES, 1), (THREE_FILES, 2)])
def test_a_damaged_joined_file_is_made_again(
    max_file_bytes: int, number: int, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parts are gone, so their layers are made again; a warning says so."""
    folder = tmp_path / "out"
    join_until(folder, Killer(-1, interrupt), max_file_bytes)
    path = sorted((tmp_path / "out.incomplete" / "checkpoint").glob("*.safetensors"))[number - 1]
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "shortened" else content[:-1] + bytes([content[-1] ^ 1]))
    with open_journal(folder, num_parts=len(MIXED), max_file_bytes=max_file_bytes, resume=True) as journal:
        assert journal.num_finished == 0
        assert not list(journal.partial.iterdir())
        assert "was damaged after it was written" in caplog.text
    write_parts(folder, MIXED, max_file_bytes=max_file_bytes, resume=True)
    write_parts(tmp_path / "undisturbed", MIXED, max_file_bytes=max_file_bytes)
    assert contents(folder) == contents(tmp_path / "undisturbed")


def test_a_damaged_joined_file_is_joined_again_if_its_parts_are_left(tmp_path: Path) -> None:
    """The run was killed after the record of the file and before its parts were removed."""
    folder, work = tmp_path / "out", tmp_path / "out.incomplete"

    def stop(path: Path, text: str) -> None:
        path.write_text(text)
        if path.name.startswith("joined-"):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, open_journal(folder, num_parts=len(MIXED)) as journal:
        for part in MIXED:
            journal.add(part)
        patch.setattr(weight_files, "write_whole", stop)
        with pytest.raises(KeyboardInterrupt):
            journal.join()
    (work / "checkpoint" / SINGLE_NAME).write_bytes(b"damaged")
    check_continues(tmp_path, 2**62)


def test_a_part_that_is_shortened_before_the_join_is_an_output_error(tmp_path: Path) -> None:
    part = tmp_path / "out.incomplete" / "part-00002.safetensors"

    def damage_and_join() -> None:
        with open_journal(tmp_path / "out") as journal:
            for tensors in PARTS:
                journal.add(tensors)
            part.write_bytes(part.read_bytes()[:-1])
            journal.join()

    with pytest.raises(OutputError, match=r"part-00002\.safetensors ended early"):
        damage_and_join()
    assert names(tmp_path) == ["out.incomplete"]
    with open_journal(tmp_path / "out", resume=True) as journal:
        assert journal.num_finished == 1, "the damaged part is made again"


def test_a_disk_that_fills_up_during_the_join_is_an_output_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "write_joined", fail)
        with pytest.raises(OutputError, match=rf"{tmp_path / 'out'} cannot be written \(No space left on device\)"):
            write(tmp_path / "out", 3)
    assert names(tmp_path) == ["out.incomplete"]
    write(tmp_path / "out", 3, resume=True)
    write(tmp_path / "undisturbed", 3)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


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
        journal.join()
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
