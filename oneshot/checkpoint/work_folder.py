"""The folder `OUT.incomplete` in which a run works: its files, which of them are good, and how it is removed.

- `fingerprint.json` says which run it belongs to, and `lock` is held by the process that writes;
- `checkpoint/` becomes OUT. Its weight files are written part by part: layers, and after them what is outside the
  layers. A form with a file of its own has them beside `checkpoint/` until the end;
- `record-00001.json` … are written when a part is on the disk, with its checksums; a `scaffold` lies beside the record
  if the streams passed through other tensors than the stored ones;
- `saved-….json` and `saved-….safetensors` are what was measured or written once: plan, text, embedding. Records say
  which of them the part was made with.

All files but the weights appear whole or not at all, and JSON files are sealed with a checksum. So everything is good
unless it was damaged later, which is noticed. Records and saved values have the hashes of the input's tensors that were
read before (`read_log`).
"""

import errno
import fnmatch
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from oneshot.checkpoint.weight_files import WeightFiles
from oneshot.errors import OutputError, cause
from oneshot.fields import FLAGS
from oneshot.machine.durable import UNFINISHED, DamagedFileError, checksum, flush, read_intact, read_sealed

logger = logging.getLogger(__name__)
Inputs = Mapping[str, Sequence[Path]]

FINGERPRINT, LOCK, CHECKPOINT = "fingerprint.json", "lock", "checkpoint"
BLOCK_BYTES = 512  # of st_blocks
FIRST_FILES = {LOCK, CHECKPOINT, FINGERPRINT + UNFINISHED}  # written before the fingerprint
PATIENCE_SECONDS = 1.0  # for a lock that another command holds only to ask who has it


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

    def acquire(self) -> FileLock:
        """Return the lock of the folder, which is made if necessary. Raises `OutputError` if a process has it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            lock = FileLock(self.lock, timeout=PATIENCE_SECONDS)
            try:
                lock.acquire()  # it makes the folder
                break
            except Timeout as error:
                raise OutputError(_busy(self.path)) from error
            except (FileNotFoundError, FileExistsError):  # a run that ends removed the folder meanwhile
                if time.monotonic() > deadline:
                    raise
        flush(self.path.parent)
        return lock

    def is_busy(self) -> bool:
        """Return whether a process has the lock."""
        try:
            with FileLock(self.lock, timeout=0):
                if not self.fingerprint.exists():  # its run has ended just now
                    self.remove()
                return False
        except Timeout:
            return True
        except (FileNotFoundError, FileExistsError):  # a run that ends removed the folder meanwhile
            return False

    def _names_like(self, pattern: str) -> list[str]:
        try:
            return fnmatch.filter(self._names(), pattern)
        except NotADirectoryError:
            return []

    def _names(self) -> set[str]:
        try:
            return {path.name for path in self.path.iterdir()}
        except FileNotFoundError:  # a run that ends removes the folder
            return set()

    def is_foreign(self) -> bool:
        """Return whether the path holds something that no run has left there."""
        try:
            names = self._names()
        except NotADirectoryError:  # the path, or one above it
            return self.path.exists()
        return FINGERPRINT not in names and not names <= FIRST_FILES

    def holds_something(self) -> bool:
        """Return whether an interrupted run left anything to continue with."""
        return any(self._names_like(pattern) for pattern in ("record-*.json", "saved-*.json"))

    def weight_bytes(self) -> int:
        """Return the bytes of the disk that weight files take, without the places where nothing was written yet."""
        return sum(path.stat().st_blocks * BLOCK_BYTES for path in self._weight_files())

    def _weight_files(self) -> list[Path]:
        """Return the weight files and their index, of the result or beside it."""
        return [path for folder in (self.checkpoint, self.path) for path in folder.glob("model*.safetensors*")]

    def count_records(self) -> int:
        """Return how many parts have a record."""
        return len(self._names_like("record-*.json"))

    def continues(self, fingerprint: dict[str, Any]) -> bool:
        """Return whether an interrupted run of this fingerprint left something; false if no run did.

        Raises `OutputError` for another run's, and for a damaged fingerprint: what is finished may belong to any run.
        """
        try:
            found = read_sealed(self.fingerprint)
        except DamagedFileError as error:
            if not self.holds_something():
                return False
            raise OutputError(
                f"{self.fingerprint} is damaged or of another version, so the interrupted run cannot continue; restore "
                "the file, or start anew with --overwrite instead of --resume."
            ) from error
        if found is not None and found != fingerprint:
            differences = ", ".join(FLAGS.get(name, name) for name in _differences(found, fingerprint))
            raise OutputError(
                f"{self.path} was begun by another run (different: {differences}); give the same options and input, or "
                "start anew with --overwrite instead of --resume."
            )
        return found is not None

    def finished(self, files: WeightFiles) -> list[dict[str, Any]]:
        """Return the records of the first parts, as far as their checksums are right; remove files of other layouts."""
        for path in self._weight_files():
            if path not in files.layout.headers and path not in files.layout.index:
                path.unlink()
        records: list[dict[str, Any]] = []
        for number in range(len(files.layout.parts)):
            path = self.record(number)
            record = read_intact(path)
            if record is None and not path.exists():
                break
            damaged = path if record is None else self._damaged(number, record, files)
            if record is None or damaged is not None:
                logger.warning("%s was damaged after it was written; it and what follows is made again.", damaged)
                break
            records.append(record)
        return records

    def _damaged(self, number: int, record: dict[str, Any], files: WeightFiles) -> Path | None:
        """Return the first file of a part whose bytes do not have the record's checksums; None if all have."""
        scaffold, expected = self.scaffold(number), record["scaffold"]
        if expected is not None and (not scaffold.exists() or checksum(scaffold) != expected):
            return scaffold
        return files.damaged(number, record["checksums"])

    def clear(self) -> None:
        """Remove what an earlier run left; the lock stays."""
        self._remove_checkpoint()
        self._unlink_files()

    def _remove_checkpoint(self) -> None:
        if self.checkpoint.exists():
            shutil.rmtree(self.checkpoint)

    def remove(self) -> None:
        """Remove the folder, whose lock this process has.

        The fingerprint goes last, so that a killed removal is still known as a run's. Another run may begin in the
        folder as soon as the lock's file is gone.
        """
        self._remove_checkpoint()
        self._unlink_files()
        self.lock.unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def _unlink_files(self) -> None:
        """Remove the files of a run except the lock, and the fingerprint last."""
        for path in sorted(self.path.iterdir(), key=lambda path: path == self.fingerprint):
            if path.is_file() and path != self.lock:
                path.unlink()


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of unequal values, also those inside objects."""
    names = []
    for name in sorted(found.keys() | expected.keys()):
        ours, theirs = expected.get(name), found.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            names += _differences(theirs, ours)
        elif ours != theirs:
            names.append(name)
    return names


def _busy(path: Path) -> str:
    return f"Another process is writing {path}; choose another --output."


def refuse_output(folder: Path, *, overwrite: bool, resume: bool, is_locked: bool = False) -> None:
    """Raise `OutputError` if a finished or interrupted run is in the way and no option says what to do with it.

    `is_locked`: whether this process has the lock.
    """
    if folder.exists() and not (overwrite or resume):
        raise OutputError(f"{folder} exists already; choose another --output or add --overwrite.")
    if folder.exists() and not _is_replaceable(folder):
        raise OutputError(
            f"{folder} is not a checkpoint, so it is not overwritten; choose another --output or remove it."
        )
    work = WorkFolder(folder)
    if work.is_foreign() and work.holds_something() and work.lock.exists():
        raise OutputError(
            f"{work.path} lacks its {FINGERPRINT}, so nothing says which run it belongs to; restore the file, or "
            "remove the folder."
        )
    if work.is_foreign():
        raise OutputError(
            f"{work.path} is in the way and does not hold an interrupted run; move it, or choose another --output."
        )
    if work.holds_something() and not (overwrite or resume):
        if not is_locked and work.is_busy():
            raise OutputError(_busy(work.path))
        if not work.holds_something():  # its run has ended just now
            return refuse_output(folder, overwrite=overwrite, resume=resume)
        raise OutputError(
            f"{work.path} holds an interrupted run; continue with --resume, start anew with --overwrite, or remove it."
        )


def _is_replaceable(folder: Path) -> bool:
    """Return whether a folder is a checkpoint or empty; nobody wants a home folder overwritten."""
    try:
        names = {path.name for path in folder.iterdir()}  # one look, as a run may replace the folder meanwhile
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False
    return not names or "config.json" in names


def remove_leftovers(folder: Path, fingerprint: dict[str, Any]) -> None:
    """Remove what a run of this fingerprint left beside `folder` if it was killed after it had finished."""
    work = WorkFolder(folder)
    try:
        if read_sealed(work.fingerprint) != fingerprint:
            return
        with FileLock(work.lock, timeout=0):
            if read_sealed(work.fingerprint) == fingerprint:  # still, now that no process may change it
                work.remove()
    except (
        Timeout,
        FileNotFoundError,
        DamagedFileError,
    ):  # another process is making the same result again; a folder of anyone
        return


def output_folder(output: str) -> Path:
    """Return the folder of the result. Raises `OutputError` for an impossible name."""
    try:
        folder = Path(output).expanduser()
        if not folder.name:
            raise OutputError(f"--output {output} is not a new folder; name one that does not exist yet.")
        folder.resolve().exists()
        WorkFolder(folder).path.exists()  # its name is longer
        str(folder).encode()  # safetensors accepts only UTF-8
        for path in (WorkFolder(folder).path, folder, *folder.parents):
            if path.is_symlink() and not path.exists():
                raise OutputError(f"{path} is a link to what does not exist; remove it, or choose another --output.")
    except (OSError, RuntimeError, ValueError) as error:  # too long, unknown user, a zero byte, not UTF-8
        raise OutputError(f"--output {output} cannot be used ({cause(error)}); choose another.") from error
    return folder


def refuse_place(output: Path, inputs: Inputs, *, overwrite: bool, resume: bool) -> None:
    """Raise `OutputError` if the result cannot appear at its place; `inputs` as of `refuse_inputs`."""
    refuse_inputs(output, inputs)
    refuse_output(output, overwrite=overwrite, resume=resume)
    refuse_unwritable(output)


def refuse_inputs(output: Path, inputs: Inputs) -> None:
    """Raise `OutputError` if a file or a folder that the run reads lies where its result appears; links are followed.

    `inputs`: their paths, by what a sentence calls them.
    """
    for place in (output, WorkFolder(output).path):
        for name, paths in inputs.items():
            if any(path.resolve().is_relative_to(place.resolve()) for path in paths):
                raise OutputError(f"{place} holds {name}; choose another --output.")


def refuse_file(path: Path, inputs: Inputs, *, overwrite: bool) -> None:
    """Raise `OutputError` if no file can be written to this path; nothing stays there.

    `inputs`: files and folders that the run reads, by what a sentence calls them; no file of theirs is replaced.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file as --output.")
    for name, places in inputs.items():
        if path.exists() and any(path.resolve().is_relative_to(place.resolve()) for place in places):
            raise OutputError(f"{path} belongs to {name}; choose another --output.")
    if path.exists() and not overwrite:
        raise OutputError(f"{path} exists already; choose another --output or add --overwrite.")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is not a folder; name a file in one that exists as --output.")
    refuse_unwritable(path)


def refuse_unwritable(output: Path) -> None:
    """Raise `OutputError` if no folder can be made where the result should be; nothing stays there."""
    place = next(folder for folder in output.absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".oneshot-", dir=place):
            pass
    except OSError as error:
        raise OutputError(f"{output} cannot be written ({cause(error)}); choose another --output.") from error
