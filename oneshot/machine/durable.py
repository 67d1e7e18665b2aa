"""Files that are there completely or not at all, also after a power cut, and that say whether they are damaged."""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oneshot.json_text import json_text

UNFINISHED = ".unfinished"


class DamagedFileError(Exception):
    """A sealed file is not what `write_sealed` wrote."""


def write_whole(path: Path, text: str) -> None:
    """Write a small text file under another name, flush it to the disk and rename it.

    Raises `OSError` if it cannot be written; the file is then as it was, and no other one stays.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
        make_durable(unfinished, path)
    except OSError:
        with suppress(OSError):  # of a folder that cannot be written; the first error is told
            unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block with this folder, which nothing is written to for that."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # network file systems without locks of folders: then nobody waits
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def make_durable(unfinished: Path, path: Path) -> None:
    """Flush a written file to the disk and give it its name, which is also flushed."""
    flush(unfinished)
    os.replace(unfinished, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file to the disk; of a folder the names in it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems flush no folders
            raise
    finally:
        os.close(number)


def flush_tree(folder: Path) -> None:
    """Flush everything in a folder to the disk: contents first, then the names."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            flush(Path(parent) / name)
        flush(Path(parent))


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON values with their checksum, as `write_whole`."""
    write_whole(path, json_text({"sha256": seal(content), "content": content}, indent=None))


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Return the values that `write_sealed` wrote; None without the file. Raises `DamagedFileError`."""
    try:
        stored = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is not JSON") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("content"), dict):
        raise DamagedFileError(f"{path} has other entries")
    content: dict[str, Any] = stored["content"]
    if stored.get("sha256") != seal(content):
        raise DamagedFileError(f"{path} has another checksum")
    return content


def read_intact(path: Path) -> dict[str, Any] | None:
    """Return the values as `read_sealed`; None without the file, and for a damaged one."""
    try:
        return read_sealed(path)
    except DamagedFileError:
        return None


def seal(content: dict[str, Any]) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json_text(content, indent=None).encode()).hexdigest()


def as_stored(content: dict[str, Any]) -> dict[str, Any]:
    """Return JSON values as `read_sealed` returns them."""
    stored: dict[str, Any] = json.loads(json_text(content))
    return stored


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
