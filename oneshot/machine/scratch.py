"""Scratch folders of a process: removed when it is done, or by a later run if the process was killed."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX, LOCK = "oneshot-", "oneshot-scratch.lock"  # no other folder of ours has a file of this name


@contextmanager
def scratch_folder(place: str | Path | None = None) -> Iterator[Path]:
    """Make a folder in `place` (None: the system's temporary folder) for a while -> its path.

    The process holds a lock in it, which the system takes back however the process ends. So a folder whose lock is free
    belongs to nobody, and is removed first. Raises `OSError` if nothing can be written there.
    """
    parent = Path(tempfile.gettempdir() if place is None else place)
    remove_abandoned(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = FileLock(folder / LOCK, timeout=0)
        try:
            lock.acquire()
            break
        except (Timeout, FileNotFoundError, FileExistsError):  # another run removes it, as it was not locked yet
            continue
    files = folder / "files"
    try:
        folder.chmod(0o700)  # if it was removed before it was locked, the lock made it again
        files.mkdir()
        yield files
    finally:
        if files.exists():
            shutil.rmtree(files)
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)  # empty; another run may remove it at the same moment


def remove_abandoned(parent: Path) -> None:
    """Remove scratch folders of this user whose process has ended without removing them."""
    for folder in parent.glob(f"{PREFIX}*"):
        if _is_own(folder) and _is_own(folder / LOCK):
            try:
                with FileLock(folder / LOCK, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)  # its process or another run may do so at the same moment
            except (Timeout, FileNotFoundError, FileExistsError):  # in use, or gone
                continue


def _is_own(path: Path) -> bool:
    """Return whether a path is a folder or file of this user, and no link."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode)
