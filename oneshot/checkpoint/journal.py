"""The journal of a run: finished work on disk, so that an interrupted run continues and ends with the same bytes.

A run works in `OUT.incomplete`:

- `fingerprint.json` says which run it belongs to, and `lock` is held by the process that writes;
- `part-00001.safetensors` … are finished layers, and after them what is outside the layers; each has a record with its
  checksum, and a `scaffold` if the streams passed through other tensors than the stored ones;
- `saved-….json` and `saved-….safetensors` are what was measured or written once: plan, text, embedding;
- `checkpoint/` becomes OUT. At the end the parts are joined there into the files that users expect.

Files appear whole or not at all. So whenever a run is killed, the parts with records are good, and a run with the same
fingerprint continues after them.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oneshot.checkpoint.durable import UNFINISHED, checksum, make_durable, read_whole, write_whole
from oneshot.checkpoint.join import StoredTensor, file_names, group_by_size, stored_tensors, write_joined
from oneshot.checkpoint.reader import INDEX_NAME, all_finite
from oneshot.errors import CalibrationError, CheckpointError, ConfigError, OutputError, PlanError, ProfileError, cause
from oneshot.machine import ALONE, Workers

logger = logging.getLogger(__name__)

WRONG_INPUT = (CalibrationError, CheckpointError, ConfigError, PlanError, ProfileError)
FINGERPRINT, LOCK, CHECKPOINT, LAYOUT = "fingerprint.json", "lock", "checkpoint", "layout.json"
FIRST_FILES = {LOCK, CHECKPOINT, FINGERPRINT + UNFINISHED}  # written before the fingerprint

Tensors = dict[str, torch.Tensor]


def incomplete_folder(folder: Path) -> Path:
    """Return the folder in which a run that writes `folder` works until it is done."""
    return folder.with_name(f"{folder.name}.incomplete")


def refuse_output(folder: Path, *, overwrite: bool, resume: bool) -> None:
    """Raise `OutputError` if a finished or interrupted run is in the way and no option says what to do with it."""
    if folder.exists() and not (overwrite or resume):
        raise OutputError(f"{folder} exists already; choose another --output or add --overwrite.")
    if folder.exists() and not _is_replaceable(folder):
        raise OutputError(
            f"{folder} is not a checkpoint, so it is not overwritten; choose another --output or remove it."
        )
    work = incomplete_folder(folder)
    if _is_foreign(work):
        raise OutputError(
            f"{work} is in the way and does not hold an interrupted run; move it, or choose another --output."
        )
    if _holds_something(work) and not (overwrite or resume):
        raise OutputError(
            f"{work} holds an interrupted run; continue with --resume, start anew with --overwrite, or remove it."
        )


def peek_saved(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the values that an interrupted run of `folder` saved under a name; None without them."""
    return read_whole(_saved_path(folder, name))


def _is_replaceable(folder: Path) -> bool:
    """Return whether a folder is a checkpoint or empty; nobody wants a home folder overwritten."""
    return folder.is_dir() and ((folder / "config.json").exists() or not any(folder.iterdir()))


def _is_foreign(work: Path) -> bool:
    """Return whether a path holds something that no run has left there."""
    if not work.is_dir():
        return work.exists()
    return not (work / FINGERPRINT).exists() and not {path.name for path in work.iterdir()} <= FIRST_FILES


def _holds_something(work: Path) -> bool:
    """Return whether an interrupted run left anything to continue with."""
    return any(work.glob("record-*.json")) or any(work.glob("saved-*.json"))


class Journal:
    """Write parts into `OUT.incomplete` and rename it when complete: OUT is whole or is not there.

    A context manager: `add` every part, in order, then `join`, then `commit`. Leaving without `commit` keeps the
    finished parts for `resume`. Everything is removed if there are none, or if the input is at fault. An earlier output
    (only with `overwrite`) is replaced at the commit and not sooner.

    Every process of a run has a journal and calls it alike. Only the main one touches the disk; what is read reaches
    all of them.

    Args:
        num_parts: the number of calls of `add`; parts that a resumed run finds need not be added again.
        fingerprint: JSON values that identify the result; only a run with equal ones may continue.
        resume: whether to continue an interrupted run; without one, a run starts from the beginning.
        expected_bytes: of the result's weights, to check the free disk space.
        max_file_bytes: of one weight file of the result.
        background: whether a thread writes a part while the next one is computed. At most one part waits. Its error
            is raised by the next call, or when the journal is left.

    Raises `OutputError` if the output exists, is being written by another process, belongs to another run, cannot be
    written, or the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_parts: int,
        fingerprint: dict[str, Any],
        workers: Workers = ALONE,
        overwrite: bool = False,
        resume: bool = False,
        expected_bytes: int = 0,
        max_file_bytes: int = 2**62,
        background: bool = False,
    ) -> None:
        self.folder, self._work, self._num_parts = folder, incomplete_folder(folder), num_parts
        self._max_file_bytes, self._workers = max_file_bytes, workers
        self.partial = self._work / CHECKPOINT
        self.num_finished = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal") if background else None
        self._pending: Future[None] | None = None
        if workers.is_main:
            self._acquire(overwrite=overwrite, resume=resume)
            try:
                self._open(fingerprint, overwrite and not resume, expected_bytes)
            except OSError as error:
                self._leave()
                raise OutputError(_unwritable(folder, error.strerror or str(error))) from error
            except BaseException:
                self._leave()
                raise
        self.num_finished = workers.share(0, lambda: self.num_finished)

    def _acquire(self, *, overwrite: bool, resume: bool) -> None:
        refuse_output(self.folder, overwrite=overwrite, resume=resume)
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self._work / LOCK, timeout=0)
            self._lock.acquire()
        except Timeout as error:
            raise OutputError(f"Another process is writing {self._work}; choose another --output.") from error
        except OSError as error:
            raise OutputError(
                f"{self.folder} cannot be written ({error.strerror}); choose another --output."
            ) from error

    def _open(self, fingerprint: dict[str, Any], anew: bool, expected_bytes: int) -> None:
        found = read_whole(self._work / FINGERPRINT)
        if anew or found is None:
            self._clear()
        elif found != fingerprint:
            differences = ", ".join(_differences(found, fingerprint))
            raise OutputError(
                f"{self._work} was begun by another run (different: {differences}); give the same options and input, "
                "or start anew with --overwrite."
            )
        else:
            self.num_finished = self._count_finished()
        missing = expected_bytes * (self._num_parts - self.num_finished) // self._num_parts
        if self.num_finished < self._num_parts:
            missing += min(expected_bytes, self._max_file_bytes)  # one joined file exists beside its parts
        free_bytes = shutil.disk_usage(self._work).free
        if free_bytes < missing:
            raise OutputError(
                f"{self.folder.parent} has {free_bytes / 1e9:.1f} GB free, the result needs {missing / 1e9:.1f} GB; "
                "free some space or choose another --output."
            )
        write_whole(self._work / FINGERPRINT, json.dumps(fingerprint, indent=2) + "\n")

    def _clear(self) -> None:
        """Remove what an earlier run left; the lock stays."""
        self._clear_checkpoint()
        _unlink_files(self._work)

    def _clear_checkpoint(self) -> None:
        shutil.rmtree(self.partial)
        self.partial.mkdir()
        for path in (*self._work.glob("joined-*.json"), *self._work.glob(LAYOUT)):
            path.unlink()

    def _count_finished(self) -> int:
        """Return how many parts from the first on have a record and right checksums.

        Parts that were joined already count only if all others are there, because no layer can be read from them.
        """
        joined = self._joined_parts()
        for number in range(self._num_parts):
            record = read_whole(self._record_path(number))
            damaged = None if record is None else self._damaged(record["checksums"])
            if record is None or (damaged is not None and number not in joined):
                if damaged is not None:
                    logger.warning("%s was damaged after it was written; it and what follows is made again.", damaged)
                self._clear_checkpoint()
                return min(number, *joined) if joined else number
        return self._num_parts

    def _joined_parts(self) -> set[int]:
        """Return the parts whose bytes are completely in joined files that are good; forget the other files."""
        parts: set[int] = set()
        good = True
        for path in sorted(self._work.glob("joined-*.json")):
            record = read_whole(path)
            good = good and record is not None and self._damaged(record["checksums"]) is None
            if good and record is not None:
                parts |= set(record["parts"])
            else:
                path.unlink()
        return parts

    def _damaged(self, checksums: dict[str, str]) -> Path | None:
        """Return the first file that is absent or has another checksum; None if all are good."""
        for name, expected in checksums.items():
            path = self._work / name
            if not path.exists() or checksum(path) != expected:
                return path
        return None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._workers.is_main:
            return
        late = None if self._pending is None else self._pending.exception()  # the thread finishes its part
        self._pending = None
        if self._thread is not None:
            self._thread.shutdown()
        if error is not None and late is not None:
            logger.warning("The last part was not written (%s).", cause(late))
        reason = late if error is None else error
        self._leave(useless=isinstance(reason, WRONG_INPUT))
        if self._work.exists():
            logger.warning(
                "%s keeps %d of %d parts; the same command with --resume continues after them.",
                self._work,
                self.num_finished,
                self._num_parts,
            )
        if isinstance(reason, OSError):
            raise OutputError(_unwritable(self.folder, reason.strerror or str(reason))) from reason
        if error is None and late is not None:
            raise late

    def _leave(self, *, useless: bool = False) -> None:
        """Release the lock, and remove the folder unless it holds something to continue with."""
        if self._work.exists() and (useless or not _holds_something(self._work)):
            _remove_folder(self._work)
        self._lock.release()

    def add(self, tensors: Tensors, *, record: dict[str, Any] | None = None, scaffold: Tensors | None = None) -> None:
        """Write the next part; no file if there are no tensors.

        `record`: JSON values, `scaffold`: tensors that `reread` must return until the end.

        Raises `OutputError` for a tensor with NaN or Inf.
        """
        self._settle()
        number = self.num_finished
        self.num_finished += 1
        if not self._workers.is_main:
            return
        if self._thread is None:
            self._write_part(number, tensors, record, scaffold)
        else:
            self._pending = self._thread.submit(self._write_part, number, tensors, record, scaffold)

    def _settle(self) -> None:
        """Wait for the part that a thread writes; raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_part(
        self, number: int, tensors: Tensors, record: dict[str, Any] | None, scaffold: Tensors | None
    ) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not all_finite(tensor):
                self.num_finished = number
                raise OutputError(
                    f"{name} became NaN or Inf and is not written; run with --dtype float32, a larger --set damping= "
                    "or another --save-dtype."
                )
        try:
            checksums = {
                path.name: self._write(path, content)
                for path, content in ((self._part(number), tensors), (self._scaffold(number), scaffold))
                if content
            }
            write_whole(self._record_path(number), json.dumps({"checksums": checksums, "record": record or {}}))
        except BaseException:
            self.num_finished = number
            raise

    def _write(self, path: Path, tensors: Tensors) -> str:
        unfinished = path.with_name(path.name + UNFINISHED)
        on_host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        try:
            save_file(on_host, unfinished, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OutputError(_unwritable(self.folder, str(error))) from error
        digest = checksum(unfinished)
        make_durable(unfinished, path)
        return digest

    def save(self, name: str, values: dict[str, Any]) -> None:
        """Write JSON values that a resumed run finds with `saved`."""
        self._settle()
        if self._workers.is_main:
            write_whole(_saved_path(self.folder, name), json.dumps(values))

    def saved(self, name: str) -> dict[str, Any] | None:
        """Return what this run or an interrupted one saved under a name, on every process; None without it."""
        return self._workers.share(0, lambda: peek_saved(self.folder, name))

    def save_tensors(self, name: str, tensors: Tensors) -> None:
        """Write tensors that a resumed run finds with `saved_tensors`."""
        self._settle()
        if self._workers.is_main:
            self._write(self._tensors_path(name), tensors)

    def saved_tensors(self, name: str) -> Tensors | None:
        """Return the tensors that were saved under a name, on every process; None without them."""
        path = self._tensors_path(name)
        return self._workers.share(0, lambda: load_file(path) if path.exists() else None)

    def records(self, count: int) -> list[dict[str, Any]]:
        """Return the records of the first `count` finished parts, on every process."""
        return self._workers.share(0, lambda: [self._content(number)["record"] for number in range(count)])

    def reread(self, number: int) -> tuple[Tensors, Tensors]:
        """Return the tensors and the scaffold of a finished part, on every process."""
        self._settle()

        def load() -> tuple[Tensors, Tensors]:
            part, scaffold = (
                load_file(path) if path.exists() else {} for path in (self._part(number), self._scaffold(number))
            )
            return part, scaffold

        return self._workers.share(0, load)

    def stored(self) -> list[StoredTensor]:
        """Return the tensors of the finished parts, in order; for a form with a file layout of its own."""
        parts = map(self._part, range(self._num_parts))
        return [tensor for path in parts if path.exists() for tensor in stored_tensors(path)]

    def join(self, advance: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Join the finished parts into the weight files of the result, and remove each part when its bytes are there.

        One `model.safetensors` if it is small enough, else numbered files with an index. No tensor is in memory.
        """
        self._settle()
        if not self._workers.is_main:
            return
        done = [read_whole(path) for path in sorted(self._work.glob("joined-*.json"))]
        parts, stored = {self._part(number): number for number in range(self._num_parts)}, self.stored()
        layout = read_whole(self._work / LAYOUT)
        if layout is None:
            groups = group_by_size(stored, self._max_file_bytes)
            num_bytes = sum(tensor.num_bytes for tensor in stored)
            layout = {"files": [[tensor.name for tensor in group] for group in groups], "bytes": num_bytes}
            write_whole(self._work / LAYOUT, json.dumps(layout))
        files = file_names(len(layout["files"]))
        at_hand = {tensor.name: tensor for tensor in stored}
        for index, (file, names) in enumerate(zip(files, layout["files"], strict=True)):
            if index < len(done):
                continue
            group = [at_hand[name] for name in names]
            later = {name for other in layout["files"][index + 1 :] for name in other}
            path = self.partial / file
            unfinished = path.with_name(path.name + UNFINISHED)
            digest = write_joined(unfinished, group, advance)
            make_durable(unfinished, path)
            last = {tensor.path for tensor in group} - {at_hand[name].path for name in later}
            record = {"checksums": {f"{CHECKPOINT}/{file}": digest}, "parts": sorted(parts[path] for path in last)}
            write_whole(self._work / f"joined-{index + 1:05d}.json", json.dumps(record))
            for used in last:
                used.unlink()
        if len(files) > 1:
            places = {name: file for file, names in zip(files, layout["files"], strict=True) for name in names}
            index_content = {"metadata": {"total_size": layout["bytes"]}, "weight_map": places}
            write_whole(self.partial / INDEX_NAME, json.dumps(index_content, indent=2) + "\n")

    def commit(self) -> None:
        """Move the complete folder to its final place, and remove the traces of its making."""
        self._settle()
        if not self._workers.is_main:
            return
        if self.folder.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.replaced-", dir=self.folder.parent))
            os.rename(self.folder, replaced / "old")
            os.rename(self.partial, self.folder)
            shutil.rmtree(replaced)
        else:
            os.rename(self.partial, self.folder)
        _remove_folder(self._work)

    def _content(self, number: int) -> dict[str, Any]:
        content = read_whole(self._record_path(number))
        if content is None:
            raise OutputError(f"{self._record_path(number)} is gone; start anew with --overwrite.")
        return content

    def _tensors_path(self, name: str) -> Path:
        return self._work / f"saved-{name}.safetensors"

    def _part(self, number: int) -> Path:
        return self._work / f"part-{number + 1:05d}.safetensors"

    def _scaffold(self, number: int) -> Path:
        return self._work / f"scaffold-{number + 1:05d}.safetensors"

    def _record_path(self, number: int) -> Path:
        return self._work / f"record-{number + 1:05d}.json"


def remove_leftovers(folder: Path, fingerprint: dict[str, Any]) -> None:
    """Remove what a run of this fingerprint left beside `folder` if it was killed after it had finished."""
    work = incomplete_folder(folder)
    if read_whole(work / FINGERPRINT) != fingerprint:
        return
    try:
        with FileLock(work / LOCK, timeout=0):
            _remove_folder(work)
    except Timeout:  # another process is making the same result again
        return


def _remove_folder(work: Path) -> None:
    """Remove a folder of a run. The fingerprint goes last, so that a killed removal is still known as a run's."""
    if (work / CHECKPOINT).exists():
        shutil.rmtree(work / CHECKPOINT)
    _unlink_files(work)
    shutil.rmtree(work)


def _unlink_files(work: Path) -> None:
    """Remove the files of a run except the lock, and the fingerprint last."""
    for path in sorted(work.iterdir(), key=lambda path: path.name == FINGERPRINT):
        if path.is_file() and path.name != LOCK:
            path.unlink()


def _saved_path(folder: Path, name: str) -> Path:
    return incomplete_folder(folder) / f"saved-{name}.json"


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


def _unwritable(folder: Path, reason: str) -> str:
    return f"{folder} cannot be written ({reason}); free some space or choose another --output."
