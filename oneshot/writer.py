"""The writer: a checkpoint grows in a folder plainly marked incomplete, shard by shard, and appears when it is whole.

In `OUT.incomplete`: `fingerprint.json` says which run it belongs to, `checkpoint/` is what becomes OUT, every finished
shard has a record with its checksum, and the process that writes holds the lock. Files appear whole or not at all, so
whatever moment a run is killed at, the shards with records are good, and a run with the same fingerprint goes on
behind them.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import INDEX_NAME, all_finite
from oneshot.errors import CalibrationError, CheckpointError, ConfigError, OutputError, PlanError, ProfileError

logger = logging.getLogger(__name__)

WRONG_INPUT = (CalibrationError, CheckpointError, ConfigError, PlanError, ProfileError)
FINGERPRINT, LOCK, CHECKPOINT, UNFINISHED = "fingerprint.json", "lock", "checkpoint", ".unfinished"
FIRST_FILES = {LOCK, CHECKPOINT, FINGERPRINT + UNFINISHED}  # what is there before the fingerprint


def incomplete_folder(folder: Path) -> Path:
    """Where a run that writes `folder` works until it is done."""
    return folder.with_name(f"{folder.name}.incomplete")


def refuse_output(folder: Path, *, overwrite: bool, resume: bool) -> None:
    """Raise `OutputError` where a finished or an interrupted run is in the way, and nothing says what to do with it."""
    if folder.exists() and not (overwrite or resume):
        raise OutputError(f"{folder} exists already; choose another --output or add --overwrite.")
    if folder.exists() and not _is_replaceable(folder):
        raise OutputError(f"{folder} is no checkpoint, so it is not overwritten; choose another --output or remove it.")
    work = incomplete_folder(folder)
    if _is_foreign(work):
        raise OutputError(f"{work} is in the way and holds no interrupted run; move it, or choose another --output.")
    if _holds_something(work) and not (overwrite or resume):
        raise OutputError(
            f"{work} holds an interrupted run; go on with --resume, start anew with --overwrite, or remove it."
        )


def _is_replaceable(folder: Path) -> bool:
    """Whether it is a checkpoint, or empty: nobody wants a home folder overwritten."""
    return folder.is_dir() and ((folder / "config.json").exists() or not any(folder.iterdir()))


def _is_foreign(work: Path) -> bool:
    """Whether something lies there that no run has left."""
    if not work.is_dir():
        return work.exists()
    return not (work / FINGERPRINT).exists() and not {path.name for path in work.iterdir()} <= FIRST_FILES


def _holds_something(work: Path) -> bool:
    """Whether an interrupted run left anything to go on with."""
    return any(work.glob("record-*.json")) or any(work.glob("kept-*.json"))


def kept_values(folder: Path, name: str) -> dict[str, Any] | None:
    """What an interrupted run that was to write `folder` kept under a name; None where there is nothing."""
    return _read_json(_kept_path(folder, name))


class CheckpointWriter:
    """Writes shards into `OUT.incomplete` and renames it when complete: OUT is whole or is not there.

    A context manager: `add` every shard, in order, then `finish_weights`, then `commit`. Leaving without `commit` keeps
    the shards that are finished, for `resume`; everything is removed where there are none, or where the input is at
    fault. What lay at `folder` before (only with `overwrite`) is replaced at the commit, not sooner.

    Args:
        num_shards: how many `add` will be called for; shards that a resumed run finds need not be added again.
        fingerprint: JSON values that say which result this will be; only an equal one may go on.
        resume: whether to go on where there is an interrupted run; without one, a run starts from the beginning.

    Raises `OutputError` when the output exists, is being written by another process, belongs to another run, cannot be
    written, or the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_shards: int,
        fingerprint: dict[str, Any],
        overwrite: bool = False,
        resume: bool = False,
        expected_bytes: int = 0,
    ) -> None:
        refuse_output(folder, overwrite=overwrite, resume=resume)
        self.folder, self._work, self._num_shards = folder, incomplete_folder(folder), num_shards
        self.partial = self._work / CHECKPOINT
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self._work / LOCK, timeout=0)
            self._lock.acquire()
        except Timeout as error:
            raise OutputError(f"Another process is writing {self._work}; choose another --output.") from error
        except OSError as error:
            raise OutputError(f"{folder} cannot be written ({error.strerror}); choose another --output.") from error
        try:
            self._open(fingerprint, overwrite and not resume, expected_bytes)
        except OSError as error:
            self._leave()
            raise OutputError(_unwritable(folder, error.strerror or str(error))) from error
        except BaseException:
            self._leave()
            raise

    def _open(self, fingerprint: dict[str, Any], anew: bool, expected_bytes: int) -> None:
        self.num_finished = 0
        found = _read_json(self._work / FINGERPRINT)
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
        missing = expected_bytes * (self._num_shards - self.num_finished) // self._num_shards
        free_bytes = shutil.disk_usage(self._work).free
        if free_bytes < missing:
            raise OutputError(
                f"{self.folder.parent} has {free_bytes / 1e9:.1f} GB free, the result needs {missing / 1e9:.1f} GB; "
                "free some space or choose another --output."
            )
        _write_whole(self._work / FINGERPRINT, json.dumps(fingerprint, indent=2) + "\n")

    def _clear(self) -> None:
        """Remove what an earlier run left; the lock stays."""
        shutil.rmtree(self.partial)
        self.partial.mkdir()
        for path in self._work.iterdir():
            if path.is_file() and path.name != LOCK:
                path.unlink()

    def _count_finished(self) -> int:
        """Shards from the first on whose records are there and whose checksums are right."""
        for number in range(self._num_shards):
            record = _read_json(self._record_path(number))
            if record is None:
                return number
            for name, checksum in record["checksums"].items():
                path = self._path(name)
                if not path.exists() or _checksum(path) != checksum:
                    logger.warning("%s was damaged since it was written; it is made again, and what follows it.", path)
                    return number
        return self._num_shards

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(useless=isinstance(error, WRONG_INPUT))
        if self._work.exists():
            logger.warning(
                "%s keeps %d of %d shards; the same command with --resume goes on behind them.",
                self._work,
                self.num_finished,
                self._num_shards,
            )
        if isinstance(error, OSError):
            raise OutputError(_unwritable(self.folder, error.strerror or str(error))) from error

    def _leave(self, *, useless: bool = False) -> None:
        """Give the lock back; the folder goes, too, unless there is something in it to go on with."""
        if self._work.exists() and (useless or not _holds_something(self._work)):
            shutil.rmtree(self._work)
        self._lock.release()

    def add(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        record: dict[str, Any] | None = None,
        scaffold: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Write the next shard, no file where there are no tensors.

        `record`: JSON values, `scaffold`: tensors that `reread` shall give back until the end.

        Raises `OutputError` for a tensor with NaN or Inf.
        """
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not all_finite(tensor):
                raise OutputError(
                    f"{name} became NaN or Inf and is not written; run with --dtype float32, more --damping or another "
                    "--save-dtype."
                )
        checksums = {}
        for name, content in ((self._shard(self.num_finished), tensors), (_scaffold(self.num_finished), scaffold)):
            if content:
                checksums[name] = self._save(self._path(name), content)
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        entry = {"checksums": checksums, "tensor_bytes": sizes, "record": record or {}}
        _write_whole(self._record_path(self.num_finished), json.dumps(entry))
        self.num_finished += 1

    def _save(self, path: Path, tensors: dict[str, torch.Tensor]) -> str:
        unfinished = path.with_name(path.name + UNFINISHED)
        on_host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        try:
            save_file(on_host, unfinished, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OutputError(_unwritable(self.folder, str(error))) from error
        checksum = _checksum(unfinished)
        _make_durable(unfinished, path)
        return checksum

    def keep(self, name: str, values: dict[str, Any]) -> None:
        """Write JSON values that a resumed run finds with `kept`."""
        _write_whole(_kept_path(self.folder, name), json.dumps(values))

    def kept(self, name: str) -> dict[str, Any] | None:
        """What an interrupted run kept under a name; None where there is nothing."""
        return kept_values(self.folder, name)

    def keep_tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write tensors that a resumed run finds with `kept_tensors`."""
        self._save(self._tensors_path(name), tensors)

    def kept_tensors(self, name: str) -> dict[str, torch.Tensor] | None:
        """Tensors that this run or an interrupted one kept under a name; None where there are none."""
        path = self._tensors_path(name)
        return load_file(path) if path.exists() else None

    def record(self, number: int) -> dict[str, Any]:
        """The record of a finished shard."""
        record: dict[str, Any] = self._content(number)["record"]
        return record

    def reread(self, number: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The tensors and the scaffold of a finished shard."""
        shard, scaffold = self._path(self._shard(number)), self._path(_scaffold(number))
        tensors, scaffolding = (load_file(path) if path.exists() else {} for path in (shard, scaffold))
        return tensors, scaffolding

    def finish_weights(self) -> None:
        """Write the index over the finished shards."""
        weight_map: dict[str, str] = {}
        total_bytes = 0
        for number in range(self._num_shards):
            sizes = self._content(number)["tensor_bytes"]
            weight_map |= dict.fromkeys(sizes, self._shard(number))
            total_bytes += sum(sizes.values())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_whole(self.partial / INDEX_NAME, json.dumps(index, indent=2) + "\n")

    def commit(self) -> None:
        """Make the complete folder appear at its final place, and remove the traces of its making."""
        if self.folder.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.replaced-", dir=self.folder.parent))
            os.rename(self.folder, replaced / "old")
            os.rename(self.partial, self.folder)
            shutil.rmtree(replaced)
        else:
            os.rename(self.partial, self.folder)
        shutil.rmtree(self._work)

    def _content(self, number: int) -> dict[str, Any]:
        content = _read_json(self._record_path(number))
        if content is None:
            raise OutputError(f"{self._record_path(number)} is gone; start anew with --overwrite.")
        return content

    def _tensors_path(self, name: str) -> Path:
        return self._work / f"kept-{name}.safetensors"

    def _shard(self, number: int) -> str:
        return f"model-{number + 1:05d}-of-{self._num_shards:05d}.safetensors"

    def _path(self, name: str) -> Path:
        return (self._work if name.startswith("scaffold") else self.partial) / name

    def _record_path(self, number: int) -> Path:
        return self._work / f"record-{number + 1:05d}.json"


def _kept_path(folder: Path, name: str) -> Path:
    return incomplete_folder(folder) / f"kept-{name}.json"


def _scaffold(number: int) -> str:
    return f"scaffold-{number + 1:05d}.safetensors"


def _read_json(path: Path) -> dict[str, Any] | None:
    """A file that `_write_whole` wrote; None where it is not there or no such file."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all, also after a power cut."""
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.write_text(text)
    _make_durable(unfinished, path)


def _make_durable(unfinished: Path, path: Path) -> None:
    """Give a written file its name once its bytes are on the disk."""
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The names of the values that are not equal, those inside of objects, too."""
    names = []
    for name in sorted(found.keys() | wanted.keys()):
        ours, theirs = wanted.get(name), found.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            names += _differences(theirs, ours)
        elif ours != theirs:
            names.append(name)
    return names


def _unwritable(folder: Path, reason: str) -> str:
    return f"{folder} cannot be written ({reason}); free some space or choose another --output."
