"""Files that are there completely or not at all, also after a power cut."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

UNFINISHED = ".unfinished"


def write_whole(path: Path, text: str) -> None:
    """Write a small text file under another name, flush it to the disk and rename it."""
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.write_text(text)
    make_durable(unfinished, path)


def make_durable(unfinished: Path, path: Path) -> None:
    """Flush a written file to the disk and give it its name."""
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read_whole(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file that `write_whole` wrote; None if it is absent or something else."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
