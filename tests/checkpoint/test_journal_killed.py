"""A journal whose run is interrupted or killed before any change of the disk, and continued."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from journals import MIXED, PARTS, THREE_FILES, assert_same, contents, names, open_journal, write_parts

from oneshot.checkpoint import weight_files

pytestmark = pytest.mark.long

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
    """Continue the killed run: no part with a record is made again, and the bytes equal an undisturbed run's."""
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
