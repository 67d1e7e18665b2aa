"""The journal of a run: finished work on disk, so that an interrupted run continues and ends with the same bytes.

A run works in `OUT.incomplete` (`work_folder`). Every part is written once, at its place in the files of the result
(`layout`, `weight_files`). Its record, with checksums, follows when its bytes are on the disk. So whenever a run is
killed, the parts with records are good, and a run with the same fingerprint continues after them.
"""

import glob
import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from oneshot.checkpoint.layout import Place, lay_out
from oneshot.checkpoint.read_log import ReadLog
from oneshot.checkpoint.reader import is_damaged
from oneshot.checkpoint.saved import SavedValues, write_tensors
from oneshot.checkpoint.weight_files import WeightFiles
from oneshot.checkpoint.work_folder import WorkFolder, refuse_output
from oneshot.errors import CalibrationError, CheckpointError, ConfigError, OutputError, PlanError, ProfileError, cause
from oneshot.machine import ALONE, Workers
from oneshot.machine.durable import alone_in, as_stored, flush, flush_tree, write_sealed
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)

WRONG_INPUT = (CalibrationError, CheckpointError, ConfigError, PlanError, ProfileError)


class Journal:
    """Write parts into `OUT.incomplete` and rename it when complete: OUT is whole or is not there.

    A context manager: `expect` all parts, `add` every part, in order, then `finish`, then `commit`. Leaving without
    `commit` keeps the finished parts for `resume`. Everything is removed if there are none, or if the input is at
    fault and no earlier run has left parts. An earlier output (only with `overwrite`) is replaced at the commit and not
    sooner.

    Every process of a run has a journal and calls it alike. Only the main one touches the disk; what is read reaches
    all of them.

    Args:
        fingerprint: JSON values that identify the result; only a run with equal ones may continue.
        resume: whether to continue an interrupted run; without one, a run starts from the beginning.
        expected_bytes: bytes of the result's weights and of a copy beside them, to check the free disk space.
        log: hashes of the input's tensors as they are read. They are saved with the parts, and compared when an
            interrupted run continues. None: nothing is known of the input.
        background: whether a thread writes a part while the next one is computed. At most one part waits. Its error
            is raised by the next call, or when the journal is left.

    Raises `OutputError` if the output exists, is being written by another process, belongs to another run, cannot be
    written, or the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: dict[str, Any],
        workers: Workers = ALONE,
        overwrite: bool = False,
        resume: bool = False,
        expected_bytes: int = 0,
        log: ReadLog | None = None,
        background: bool = False,
    ) -> None:
        self.folder, self._work, self._workers = folder, WorkFolder(folder), workers
        self.partial = self._work.checkpoint
        self.num_finished = 0
        self.further: frozenset[str] = frozenset()  # of layers that predict tokens after the next one
        self._files: WeightFiles | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal") if background else None
        self._pending: Future[None] | None = None
        self._continues = False  # an interrupted run
        self._is_done = False  # its folder is removed, and another run may have made its own in the same place
        self._log = ReadLog() if log is None else log
        self._read: dict[str, str] = {}  # hashes that are on the disk
        self._saved = SavedValues(self._work)
        self._records: list[dict[str, Any]] = []
        if workers.is_main:
            self._acquire(overwrite=overwrite, resume=resume)
            try:
                self._open(fingerprint, overwrite, resume, expected_bytes)
            except OSError as error:
                self._leave()
                raise OutputError(_unwritable(folder, error.strerror or str(error))) from error
            except BaseException:
                self._leave()
                raise

    def _acquire(self, *, overwrite: bool, resume: bool) -> None:
        refuse_output(self.folder, overwrite=overwrite, resume=resume)
        try:
            self._lock = self._work.acquire()
        except OSError as error:
            raise OutputError(
                f"{self.folder} cannot be written ({error.strerror}); choose another --output."
            ) from error

    def _open(self, fingerprint: dict[str, Any], overwrite: bool, resume: bool, expected_bytes: int) -> None:
        # again, with the lock: another process may have finished meanwhile
        refuse_output(self.folder, overwrite=overwrite, resume=resume and not self.folder.exists(), is_locked=True)
        self._continues = (resume or not overwrite) and self._work.continues(fingerprint)
        if not self._continues:
            self._work.clear()
        self.partial.mkdir(exist_ok=True)
        self._expect_read(self._saved.find())
        missing = expected_bytes - self._work.weight_bytes()
        free_bytes = shutil.disk_usage(self._work.path).free
        if free_bytes < missing:
            raise OutputError(
                f"{self.folder.parent} has {free_bytes / 1e6:,.1f} MB free, the result needs {missing / 1e6:,.1f} MB; "
                "free some space or choose another --output."
            )
        write_sealed(self._work.fingerprint, fingerprint)

    def _expect_read(self, hashes: dict[str, str]) -> None:
        """Compare what is read of the input with what finished work was made from."""
        self._read |= hashes
        self._log.expect(
            hashes,
            lambda place: OutputError(
                f"{place} is not what {self._work.path} was made from; give the same weights, or start anew with "
                "--overwrite."
            ),
        )

    def _newly_read(self) -> dict[str, str]:
        """Return the hashes of the input's tensors that are not on the disk yet."""
        new = {name: found for name, found in self._log.hashes.items() if name not in self._read}
        self._read |= new
        return new

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
        self._leave(useless=isinstance(reason, WRONG_INPUT) and not self._continues)
        if not self._is_done and self._work.path.exists():
            logger.warning(
                "%s keeps %d finished parts; the same command with --resume continues after them.",
                self._work.path,
                self._work.count_records() if self._files is None else self.num_finished,
            )
        if isinstance(reason, OSError):
            raise OutputError(_unwritable(self.folder, reason.strerror or str(reason))) from reason
        if error is None and late is not None:
            raise late

    def _leave(self, *, useless: bool = False) -> None:
        """Release the lock, and remove the folder unless it holds something to continue with."""
        if not self._is_done and self._work.path.exists() and (useless or not self._work.holds_something()):
            self._is_done = True
            self._work.remove()
        self._lock.release()

    def expect(
        self,
        parts: Sequence[Tensors],
        *,
        direct: bool = True,
        max_file_bytes: int = 2**62,
        further: Collection[str] = (),
    ) -> None:
        """Decide where every tensor of the run will lie, and find out which parts are finished: `num_finished`.

        Args:
            parts: what each call of `add` will have, with or without values (on torch's meta device).
            direct: whether the files are the result's; otherwise another file is made from them, see `stored`.
            max_file_bytes: maximum bytes per weight file of the result.
            further: names of those tensors that no class of a model has, see `further`.
        """
        self._settle()
        self.further = frozenset(further)
        folder = self.partial if direct else self._work.path
        self._files = WeightFiles(lay_out(parts, folder, max_file_bytes))
        self.num_finished = self._workers.share(0, self._count_finished)

    def _count_finished(self) -> int:
        self._saved.refuse_others()
        self._records = self._work.finished(self._weights)
        for record in self._records:
            self._expect_read(record["read"])
        return len(self._records)

    @property
    def _weights(self) -> WeightFiles:
        assert self._files is not None, "parts are expected before they are added"
        return self._files

    def add(self, tensors: Tensors, *, record: dict[str, Any] | None = None, scaffold: Tensors | None = None) -> None:
        """Write the next part to its place.

        `record`: JSON values, `scaffold`: tensors that `reread` must return until the end.

        Raises `OutputError` for a tensor with NaN or Inf, and for tensors that were not expected.
        """
        self._settle()
        number = self.num_finished
        self.num_finished += 1
        if not self._workers.is_main:
            return
        read = self._newly_read()
        if self._thread is None:
            self._write_part(number, tensors, record, scaffold, read)
        else:
            self._pending = self._thread.submit(self._write_part, number, tensors, record, scaffold, read)

    def _settle(self) -> None:
        """Wait for the part that a thread writes; raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_part(
        self,
        number: int,
        tensors: Tensors,
        record: dict[str, Any] | None,
        scaffold: Tensors | None,
        read: dict[str, str],
    ) -> None:
        try:
            self._weights.layout.refuse_other(number, tensors)
            for name, tensor in tensors.items():
                if is_damaged(name, tensor):
                    raise OutputError(
                        f"{name} became NaN or Inf and is not written; run with --dtype float32, a larger --set "
                        "damping= or another --save-dtype."
                    )
            checksums = self._weights.write(number, tensors)
            beside = write_tensors(self._work.scaffold(number), scaffold) if scaffold else None
            written = {"checksums": checksums, "scaffold": beside, "record": record or {}}
            written |= {"saved": self._saved.seals, "read": read}
            write_sealed(self._work.record(number), written)
            self._records = [*self._records[:number], as_stored(written)]
        except SafetensorError as error:
            self.num_finished = number
            raise OutputError(_unwritable(self.folder, str(error))) from error
        except BaseException:
            self.num_finished = number
            raise

    def save(self, name: str, values: dict[str, Any]) -> None:
        """Write JSON values that a resumed run finds with `saved`; tensors that belong to them are saved before.

        Values that are saved already stay with the tensors that they were saved with.
        """
        self._settle()
        if self._workers.is_main and self._saved.values(name) != as_stored(values):
            self._saved.save(name, values, self._newly_read())

    def saved(self, name: str) -> dict[str, Any] | None:
        """Return what this run or an interrupted one saved under a name, on every process; None without it."""
        return self._workers.share(0, lambda: self._saved.values(name))

    def save_tensors(self, name: str, tensors: Tensors) -> None:
        """Write tensors that a resumed run finds with `saved_tensors`."""
        self._settle()
        if self._workers.is_main:
            try:
                self._saved.save_tensors(name, tensors)
            except SafetensorError as error:
                raise OutputError(_unwritable(self.folder, str(error))) from error

    def saved_tensors(self, name: str) -> Tensors | None:
        """Return the tensors that were saved under a name, on every process; None without them."""
        return self._workers.share(0, lambda: self._saved.tensors(name))

    def records(self, count: int) -> list[dict[str, Any]]:
        """Return the records of the first `count` finished parts, on every process."""
        return self._workers.share(0, lambda: [record["record"] for record in self._records[:count]])

    def reread(self, number: int) -> tuple[Tensors, Tensors]:
        """Return the tensors and the scaffold of a finished part, on every process."""
        self._settle()

        def load() -> tuple[Tensors, Tensors]:
            has_scaffold = self._records[number]["scaffold"] is not None
            return self._weights.read(number), load_file(self._work.scaffold(number)) if has_scaffold else {}

        return self._workers.share(0, load)

    def stored(self) -> list[Place]:
        """Return the places of the tensors of all parts, in order; for a form with a file of its own."""
        return self._weights.layout.places

    def finish(self) -> None:
        """Complete the weight files after the last part."""
        self._settle()
        if self._workers.is_main:
            self._weights.finish()

    def commit(self) -> None:
        """Move the complete folder to its final place, and remove the traces of its making."""
        self._settle()
        if not self._workers.is_main:
            return
        flush_tree(self.partial)
        if self.folder.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.replaced-", dir=self.folder.parent))
            with alone_in(self.folder):  # nobody adds to its report now
                os.rename(self.folder, replaced / "old")
                os.rename(self.partial, self.folder)
        else:
            os.rename(self.partial, self.folder)
        flush(self.folder.parent)
        for replaced in self.folder.parent.glob(f".{glob.escape(self.folder.name)}.replaced-*"):  # also of killed runs
            shutil.rmtree(replaced)
        self._is_done = True
        self._work.remove()


def _unwritable(folder: Path, reason: str) -> str:
    return f"{folder} cannot be written ({reason}); free some space or choose another --output."
