"""What a run measured or wrote once, and a resumed run finds again: JSON values, and tensors that belong to them."""

import logging
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from oneshot.checkpoint.work_folder import WorkFolder
from oneshot.errors import OutputError
from oneshot.machine.durable import UNFINISHED, as_stored, checksum, make_durable, read_intact, seal, write_sealed
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)


class SavedValues:
    """The saved values of a run's folder. Tensors count with the values that are saved after them."""

    def __init__(self, work: WorkFolder) -> None:
        self._work = work
        self._contents: dict[str, dict[str, Any]] = {}
        self._tensor_files: dict[str, str] = {}  # checksums by name

    def find(self) -> dict[str, str]:
        """Find what an interrupted run saved; return the hashes of the input's tensors that it had read.

        What is damaged is removed with a warning, so that it is made again.
        """
        read: dict[str, str] = {}
        for path in sorted(self._work.path.glob("saved-*.json")):
            content = self._intact(path)
            if content is None:
                logger.warning("%s or what belongs to it was damaged after it was written; it is made again.", path)
                path.unlink()
                continue
            self._contents[path.stem.removeprefix("saved-")] = content
            self._tensor_files |= content["tensors"]
            read |= content["read"]
        return read

    def _intact(self, path: Path) -> dict[str, Any] | None:
        content = read_intact(path)
        for name, expected in (content or {}).get("tensors", {}).items():
            tensors = self._work.saved_tensors(name)
            if not tensors.exists() or checksum(tensors) != expected:
                return None
        return content

    def save(self, name: str, values: dict[str, Any], read: dict[str, str]) -> None:
        """Write values under a name, with the hashes of what was read before."""
        content = {"values": values, "tensors": dict(self._tensor_files), "read": read}
        write_sealed(self._work.saved(name), content)
        self._contents[name] = as_stored(content)

    def save_tensors(self, name: str, tensors: Tensors) -> None:
        """Write tensors under a name."""
        self._tensor_files[name] = write_tensors(self._work.saved_tensors(name), tensors)

    def values(self, name: str) -> dict[str, Any] | None:
        """Return the values under a name; None without them."""
        return self._contents[name]["values"] if name in self._contents else None

    def tensors(self, name: str) -> Tensors | None:
        """Return the tensors under a name; None without them."""
        return load_file(self._work.saved_tensors(name)) if name in self._tensor_files else None

    @property
    def seals(self) -> dict[str, str]:
        """Return a checksum of the values and tensors under each name."""
        return {
            name: seal({"values": content["values"], "tensors": content["tensors"]})
            for name, content in self._contents.items()
        }

    def refuse_others(self) -> None:
        """Raise `OutputError` if a finished part was made with other values than the present ones."""
        seals = self.seals
        for path in sorted(self._work.path.glob("record-*.json")):
            for name, expected in (read_intact(path) or {}).get("saved", {}).items():
                if seals.get(name) != expected:
                    raise OutputError(
                        f"{self._work.saved(name)} was lost or damaged and comes out differently now, so finished "
                        "layers do not fit; restore the file, or start anew with --overwrite instead of --resume."
                    )


def write_tensors(path: Path, tensors: Tensors) -> str:
    """Write a file of tensors at once, and return its checksum. Raises `OSError` and `SafetensorError`."""
    unfinished = path.with_name(path.name + UNFINISHED)
    on_host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(on_host, unfinished, metadata={"format": "pt"})
    digest = checksum(unfinished)
    make_durable(unfinished, path)
    return digest


def peek_saved(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the values that an interrupted run of `folder` saved under a name; None without them or if damaged."""
    content = read_intact(WorkFolder(folder).saved(name))
    return None if content is None else content["values"]


def peek_fingerprint(folder: Path) -> dict[str, Any] | None:
    """Return the fingerprint of an interrupted run of `folder`; None without one or if damaged."""
    return read_intact(WorkFolder(folder).fingerprint)
