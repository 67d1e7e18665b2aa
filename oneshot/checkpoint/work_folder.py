"""The folder `OUT.incomplete` in which a run works: its files, which of them are good, and how it is removed.

- `fingerprint.json` says which run it belongs to, and `lock` is held by the process that writes;
- `checkpoint/` becomes OUT. Its weight files are written part by part: layers, and after them what is outside the
  layers. A form with a file of its own has them beside `checkpoint/` until the end;
- `record-00001.json` … are written when a part is on the disk, with its checksums; a `scaffold` lies beside the record
  if the streams passed through other tensors than the stored ones;
- `saved-….json` and `saved-….safetensors` are what was measured or written once: plan, text, embedding.

All files but the weights appear whole or not at all. So a part with a record is good unless it was damaged later.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from oneshot.checkpoint.durable import UNFINISHED, checksum, read_whole
from oneshot.checkpoint.weight_files import WeightFiles
from oneshot.errors import OutputError

logger = logging.getLogger(__name__)

FINGERPRINT, LOCK, CHECKPOINT = "fingerprint.json", "lock", "checkpoint"
BLOCK_BYTES = 512  # of st_blocks
FIRST_FILES = {LOCK, CHECKPOINT, FINGERPRINT + UNFINISHED}  # written before the fingerprint


class WorkFolder:
    """Paths and contents of the folder in which a run that writes `output` works until it is done.

    Attributes:
        path: path of the folder, which need not exist. checkpoint: path of the folder in it that becomes the output.
        lock, fingerprint: paths of files in it.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(f"{output.name}.incomplete")
        self.checkpoint = self.path / CHECKPOINT
        self.lock, self.fingerprint = self.path / LOCK, self.path / FINGERPRINT

    def scaffold(self, number: int) -> Path:
        """Return the path of the tensors through which the streams passed a part."""
        return self.path / f"scaffold-{number + 1:05d}.safetensors"

    def record(self, number: int) -> Path:
        """Return the path of a finished part's record."""
        return self.path / f"record-{number + 1:05d}.json"

    def saved(self, name: str) -> Path:
        """Return the path of values that were saved under a name."""
        return self.path / f"saved-{name}.json"

    def saved_tensors(self, name: str) -> Path:
        """Return the path of tensors that were saved under a name."""
        return self.path / f"saved-{name}.safetensors"

    def is_foreign(self) -> bool:
        """Return whether the path holds something that no run has left there."""
        if not self.path.is_dir():
            return self.path.exists()
        return not self.fingerprint.exists() and not {path.name for path in self.path.iterdir()} <= FIRST_FILES

    def holds_something(self) -> bool:
        """Return whether an interrupted run left anything to continue with."""
        return any(self.path.glob("record-*.json")) or any(self.path.glob("saved-*.json"))

    def weight_bytes(self) -> int:
        """Return the bytes of the disk that weight files take, without the places where nothing was written yet."""
        return sum(path.stat().st_blocks * BLOCK_BYTES for path in self._weight_files())

    def _weight_files(self) -> list[Path]:
        """Return the weight files and their index, of the result or beside it."""
        return [path for folder in (self.checkpoint, self.path) for path in folder.glob("model*.safetensors*")]

    def count_records(self) -> int:
        """Return how many parts have a record."""
        return sum(1 for _ in self.path.glob("record-*.json"))

    def count_finished(self, files: WeightFiles) -> int:
        """Return how many parts from the first on have a record and right checksums; remove files of other layouts."""
        for path in self._weight_files():
            if path not in files.layout.headers and path not in files.layout.index:
                path.unlink()
        num_parts = len(files.layout.parts)
        for number in range(num_parts):
            record = read_whole(self.record(number))
            damaged = None if record is None else self._damaged(number, record, files)
            if damaged is not None:
                logger.warning("%s was damaged after it was written; it and what follows is made again.", damaged)
            if record is None or damaged is not None:
                return number
        return num_parts

    def _damaged(self, number: int, record: dict[str, Any], files: WeightFiles) -> Path | None:
        """Return the first file of a part whose bytes do not have the record's checksums; None if all have."""
        scaffold, expected = self.scaffold(number), record.get("scaffold")
        if expected is not None and (not scaffold.exists() or checksum(scaffold) != expected):
            return scaffold
        return files.damaged(number, record["checksums"])

    def clear(self) -> None:
        """Remove what an earlier run left; the lock stays."""
        self._clear_checkpoint()
        self._unlink_files()

    def _clear_checkpoint(self) -> None:
        shutil.rmtree(self.checkpoint)
        self.checkpoint.mkdir()

    def remove(self) -> None:
        """Remove the folder. The fingerprint goes last, so that a killed removal is still known as a run's."""
        if self.checkpoint.exists():
            shutil.rmtree(self.checkpoint)
        self._unlink_files()
        shutil.rmtree(self.path)

    def _unlink_files(self) -> None:
        """Remove the files of a run except the lock, and the fingerprint last."""
        for path in sorted(self.path.iterdir(), key=lambda path: path == self.fingerprint):
            if path.is_file() and path != self.lock:
                path.unlink()


def refuse_output(folder: Path, *, overwrite: bool, resume: bool) -> None:
    """Raise `OutputError` if a finished or interrupted run is in the way and no option says what to do with it."""
    if folder.exists() and not (overwrite or resume):
        raise OutputError(f"{folder} exists already; choose another --output or add --overwrite.")
    if folder.exists() and not _is_replaceable(folder):
        raise OutputError(
            f"{folder} is not a checkpoint, so it is not overwritten; choose another --output or remove it."
        )
    work = WorkFolder(folder)
    if work.is_foreign():
        raise OutputError(
            f"{work.path} is in the way and does not hold an interrupted run; move it, or choose another --output."
        )
    if work.holds_something() and not (overwrite or resume):
        raise OutputError(
            f"{work.path} holds an interrupted run; continue with --resume, start anew with --overwrite, or remove it."
        )


def _is_replaceable(folder: Path) -> bool:
    """Return whether a folder is a checkpoint or empty; nobody wants a home folder overwritten."""
    return folder.is_dir() and ((folder / "config.json").exists() or not any(folder.iterdir()))


def peek_saved(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the values that an interrupted run of `folder` saved under a name; None without them."""
    return read_whole(WorkFolder(folder).saved(name))


def remove_leftovers(folder: Path, fingerprint: dict[str, Any]) -> None:
    """Remove what a run of this fingerprint left beside `folder` if it was killed after it had finished."""
    work = WorkFolder(folder)
    if read_whole(work.fingerprint) != fingerprint:
        return
    try:
        with FileLock(work.lock, timeout=0):
            work.remove()
    except Timeout:  # another process is making the same result again
        return
