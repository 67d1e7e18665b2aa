"""A journal of several processes: only the main one touches the disk."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from journals import PARTS, names, open_journal

from oneshot.errors import CheckpointError
from oneshot.machine import Workers


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
