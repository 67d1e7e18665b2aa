"""A lazy reader of safetensors checkpoints; it holds a few tensors at a time."""

import copy
import errno
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from oneshot.checkpoint.dtypes import ITEM_BYTES
from oneshot.checkpoint.safe_files import check_readable, read_config, read_json, stored_file
from oneshot.errors import CheckpointError, cause

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
UNMAPPABLE = "unable to mmap"  # torch's words if the address space is too small
SHARD_NAME = re.compile(r"[^/\\\0]+\.safetensors")


class Checkpoint:
    """Read a folder with `config.json` and safetensors weights, tensor by tensor.

    Opening checks that every shard in the index is present and complete. It reads headers and no weights.

    Raises `CheckpointError` for a missing, empty, damaged, pickled or hostile checkpoint, and for a file that the
    system cannot map into memory.
    """

    weights_at_hand = True  # whether tensors can be read

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / "adapter_config.json").exists():
            raise CheckpointError(f"{folder} holds an adapter; merge it into the model, or remove adapter_config.json.")
        self.config = read_config(folder)
        check_readable(folder)
        self._shard_of = self._find_shards()
        self._has_values = True
        self._stored_names: dict[str, str] = {}  # of tensors that are called otherwise, see `renamed`
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for shard in sorted(set(self._shard_of.values())):
            self._read_header(shard)
        if not self.shapes:
            raise CheckpointError(f"{folder} holds no tensors; give the folder of a complete checkpoint.")

    def _find_shards(self) -> dict[str, str]:
        """Return the shard file of every tensor; the names of a single file come from its header."""
        if os.path.lexists(self.folder / SINGLE_NAME):  # before the index, as in transformers
            with _open_shard(self.folder, SINGLE_NAME) as handle:
                return dict.fromkeys(handle.keys(), SINGLE_NAME)
        if os.path.lexists(self.folder / INDEX_NAME):
            return _read_weight_map(self.folder)
        files = sorted(self.folder.glob("*.gguf"))
        if files:
            raise CheckpointError(
                f"{self.folder} holds a GGUF file and no safetensors weights; give {files[0]} itself."
            )
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*")):
            raise CheckpointError(
                f"{self.folder} holds pickled weights, which can run code when read; save it with "
                "save_pretrained(safe_serialization=True) first."
            )
        raise CheckpointError(f"{self.folder} holds no safetensors weights; give the folder of a complete checkpoint.")

    def _read_header(self, shard: str) -> None:
        """Read shapes and dtypes of a shard; refuse a tensor in two shards, because readers could differ."""
        with _open_shard(self.folder, shard) as handle:
            stored = set(handle.keys())
            for name, place in self._shard_of.items():
                if place == shard and name not in stored:
                    raise CheckpointError(
                        f"{self.folder / shard} lacks {name} though the index names it; download it again."
                    )
                if place != shard and name in stored:
                    raise CheckpointError(
                        f"{name} is stored in {self.folder / shard} and in {place}; give an undamaged checkpoint."
                    )
                if place == shard:
                    view = handle.get_slice(name)
                    self.shapes[name] = tuple(view.get_shape())
                    self.dtypes[name] = view.get_dtype()

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    @property
    def num_parameters(self) -> int:
        """Return the stored parameters: every element of every tensor in the files."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weight files."""
        return sum((self.folder / shard).stat().st_size for shard in set(self._shard_of.values()))

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of the tensors that are in this view of the files."""
        return sum(torch.Size(shape).numel() * ITEM_BYTES[self.dtypes[name]] for name, shape in self.shapes.items())

    def renamed(self, names: Mapping[str, str]) -> "Checkpoint":
        """Return a view of the same files with other names, `name -> stored name`; other tensors are not in it."""
        view = copy.copy(self)
        view._stored_names = dict(names)
        view.shapes = {name: self.shapes[stored] for name, stored in names.items()}
        view.dtypes = {name: self.dtypes[stored] for name, stored in names.items()}
        return view

    def without_values(self) -> "Checkpoint":
        """Return a view of the same files whose tensors have a dtype and a shape only (torch's meta device)."""
        view = copy.copy(self)
        view._has_values = False
        return view

    def content_hash(self) -> str:
        """Return the SHA-256 of every tensor's name, dtype, shape and first row; it identifies the model cheaply."""
        digest = hashlib.sha256()
        for shard in sorted(set(self._shard_of.values())):
            with _open_shard(self.folder, shard) as handle:
                for name in sorted(name for name in self.shapes if self._shard_of[self.stored(name)] == shard):
                    digest.update(repr((name, self.dtypes[name], self.shapes[name])).encode())
                    stored = self.stored(name)
                    first = handle.get_slice(stored)[:1] if self.shapes[name] else handle.get_tensor(stored)
                    digest.update(first.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return copies of the named tensors; the files are closed again.

        Raises `CheckpointError` for an unknown name and for weights with NaN or Inf.
        """
        tensors: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            handles: dict[str, Any] = {}
            for name in names:
                stored = self.stored(name)
                shard = self._shard_of.get(stored)
                if shard is None:
                    raise CheckpointError(f"{self.folder} lacks the tensor {name}; the checkpoint is incomplete.")
                if shard not in handles:
                    handles[shard] = stack.enter_context(_open_shard(self.folder, shard))
                tensor = handles[shard].get_tensor(stored)  # mapped, not read
                if not self._has_values:
                    tensors[name] = torch.empty_like(tensor, device="meta")
                    continue
                tensor = tensor.clone()
                if tensor.is_floating_point() and not all_finite(tensor):
                    raise CheckpointError(
                        f"{name} in {self.folder / shard} holds NaN or Inf; give an undamaged checkpoint."
                    )
                tensors[name] = tensor
        return tensors

    def read_rows(self, name: str, rows: slice) -> torch.Tensor:
        """Return a copy of some rows of a tensor, which are not checked."""
        stored = self.stored(name)
        with _open_shard(self.folder, self._shard_of[stored]) as handle:
            found: torch.Tensor = handle.get_slice(stored)[rows].clone()
            return found

    def stored(self, name: str) -> str:
        """Return the name that a tensor has in the files."""
        return self._stored_names.get(name, name)

    def read_one(self, name: str) -> torch.Tensor:
        """Return one tensor, as `read`."""
        return self.read([name])[name]

    def stating(self, **values: Any) -> "Checkpoint":
        """Return a view of the same files whose config states these values."""
        view = copy.copy(self)
        view.config = self.config | values
        return view

    def read_prefix(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return all tensors whose names begin with `prefix`, under their names without it."""
        names = [name for name in self.shapes if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensor for name, tensor in self.read(names).items()}


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is NaN or Inf; the extremes need no temporary of the tensor's size."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def _read_weight_map(folder: Path) -> dict[str, str]:
    """Return the shard file of every tensor, as the index says.

    Raises `CheckpointError` for an index that is damaged or names something else than shards beside it.
    """
    path = stored_file(folder, INDEX_NAME)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map of tensors to files; download it again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not SHARD_NAME.fullmatch(shard):
            raise CheckpointError(
                f"{path} says that {name} lies in {repr(shard)[:100]}, which is not a safetensors file of this folder; "
                "download it again."
            )
    return weight_map


def _open_shard(folder: Path, shard: str) -> Any:
    path = stored_file(folder, shard)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's own mapping
        unmappable = isinstance(error, MemoryError) or UNMAPPABLE in str(error)
        if unmappable or getattr(error, "errno", None) == errno.ENOMEM:
            size = path.stat().st_size / 2**30
            raise CheckpointError(
                f"{path} ({size:.1f} GiB) cannot be mapped into memory ({cause(error)}); raise the limit of virtual "
                "memory (ulimit -v), or split the file into shards (save_pretrained with max_shard_size)."
            ) from error
        raise CheckpointError(f"{path} is damaged or truncated ({cause(error)}); download it again.") from error
