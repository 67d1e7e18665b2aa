"""Scratch folders: gone with their process, also if it was killed; never another process's or anyone else's."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from oneshot.machine import scratch
from oneshot.machine.scratch import LOCK, scratch_folder


def killed_owner(place: Path) -> Path:
    """Return the folder of a process that was killed while it used it."""
    told, teller = os.pipe()
    child = os.fork()
    if child == 0:
        with scratch_folder(place) as folder:
            (folder / "activations").write_text("large")
            os.write(teller, os.fsencode(folder))
            time.sleep(60)
        os._exit(0)
    folder = Path(os.fsdecode(os.read(told, 4096)))
    assert folder.exists()
    with scratch_folder(place):
        assert folder.exists(), "its process lives"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return folder


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    left = killed_owner(tmp_path)
    assert left.exists()
    with scratch_folder(tmp_path) as own:
        assert not left.parent.exists()
        assert own.is_dir()
        with scratch_folder(tmp_path) as other:
            assert own.is_dir()
            assert other != own
    assert list(tmp_path.iterdir()) == []


def test_other_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result, an unfinished run, a folder of another user, and links."""
    for name in ("oneshot-out", "oneshot-out.incomplete", "elsewhere", "oneshot-theirs", "oneshot-linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "oneshot-out.incomplete" / "lock").touch()
    (tmp_path / "elsewhere" / LOCK).touch()
    (tmp_path / "oneshot-link").symlink_to("elsewhere")
    (tmp_path / "oneshot-linked" / LOCK).symlink_to("../elsewhere/lock")
    before = sorted(tmp_path.iterdir())
    scratch.remove_abandoned(tmp_path)
    (tmp_path / "oneshot-theirs" / LOCK).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        scratch.remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_another_process_took_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making a folder and locking it another run may find its lock free."""
    make, taken = tempfile.mkdtemp, list[FileLock]()

    def make_and_lose(**options: Any) -> str:
        folder = make(**options)
        if not taken:
            taken.append(FileLock(Path(folder) / LOCK))
            taken[0].acquire()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with scratch_folder(tmp_path) as folder:
        assert folder.parent != Path(taken[0].lock_file).parent
        assert folder.parent.stat().st_mode & 0o077 == 0
    taken[0].release()


def _make_many(place: str) -> None:
    for _ in range(60):
        with scratch_folder(place) as folder:
            (folder / "file").write_text("a")


def test_runs_that_begin_and_end_together_disturb_nobody(tmp_path: Path) -> None:
    """Each looks at the folders of the others, also while these are made and removed."""
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=_make_many, args=(str(tmp_path),)) for _ in range(5)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0] * 5
