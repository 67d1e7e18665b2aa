"""A lazy reader of checkpoint folders; it holds a few tensors at a time."""

import copy
import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from oneshot.architecture import StackShape
from oneshot.checkpoint.compressed import again
from oneshot.checkpoint.dtypes import DTYPES, ITEM_BYTES
from oneshot.checkpoint.quantised import NOT_QUANTISED, QuantisedWeight, QuantisedWeights
from oneshot.checkpoint.quantised_kinds import find_quantised
from oneshot.checkpoint.read_log import ReadLog
from oneshot.checkpoint.safe_files import check_readable, read_config, read_json, stored_file, weights_behind
from oneshot.checkpoint.torch_file import TorchFile
from oneshot.errors import CheckpointError, cause

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TORCH_NAME = "pytorch_model.bin"
IMPORTANCE_NAME = "imatrix.gguf"  # beside a GGUF model, and no model
UNMAPPABLE = "unable to mmap"  # torch's words if the address space is too small
MAPPED_BYTES = 2**28  # of a file that are mapped together where nothing but hashes is wanted
INDICES = {INDEX_NAME: "safetensors", f"{TORCH_NAME}.index.json": "bin"}  # with the ending of the files they name
WEIGHT_NAMES = (SINGLE_NAME, INDEX_NAME, TORCH_NAME, f"{TORCH_NAME}.index.json")  # in transformers' order
SHARD_NAME = re.compile(r"[^/\\\0]+")
# tensors that bound the values of linears in Gemma 4's audio tower, where Inf bounds nothing
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Checkpoint:
    """Read a folder with `config.json` and weights as safetensors or `pytorch_model.bin`, tensor by tensor.

    Quantised weights of the kinds that `find_quantised` knows are dequantised as they are read, and the config does not
    state them.

    Opening checks that every shard in the index is present and complete. It reads headers and no weights.

    Raises `CheckpointError` for a missing, empty, damaged or hostile checkpoint, and for a file that the system cannot
    map into memory.
    """

    weights_at_hand = True  # whether tensors can be read
    quantised: QuantisedWeights = NOT_QUANTISED
    log: ReadLog | None = None  # hashes of what is read from this checkpoint and its views
    stated: StackShape | None = None  # the sizes of a result of ours, see `own_sizes`
    beside_bytes: int = 0  # what reading a tensor takes beside it and its pages
    _saved: tuple[int, int] = (0, 0)  # parameters and bytes that low ranks save in the files
    _beside: "Checkpoint | None" = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / "adapter_config.json").exists():
            raise CheckpointError(f"{folder} holds an adapter; merge it into the model, or remove adapter_config.json.")
        self.config = read_config(folder)
        check_readable(folder)
        for file in weights_behind(folder):  # which are copied
            with _open_shard(folder, file):
                pass
        stated = self._find_shards()
        self._shard_of: dict[str, str] = {}
        self.has_values = True
        self._stored_names: dict[str, str] = {}  # of tensors that are called otherwise, see `renamed`
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for shard in sorted(set(stated.values())):
            self._read_header(shard, {name for name, place in stated.items() if place == shard})
        self._check_shards(stated)
        self._take_quantised()
        if not self.shapes:
            raise CheckpointError(f"{folder} holds no tensors; give the folder of a complete checkpoint.")

    def _find_shards(self) -> dict[str, str]:
        """Return the weight file of every tensor; the names of a single file come from its header."""
        for file in WEIGHT_NAMES:
            if os.path.lexists(self.folder / file):
                if file in INDICES:
                    return read_weight_map(self.folder, file)
                with _open_shard(self.folder, file) as handle:
                    return dict.fromkeys(handle.keys(), file)
        files = sorted(path for path in self.folder.glob("*.gguf") if path.name != IMPORTANCE_NAME)
        if files:
            layers = self.config.get("layers")  # of the form gguf; equal ones are opened as any other GGUF file
            if isinstance(layers, list) and any(layer != layers[0] for layer in layers):
                raise CheckpointError(
                    f"{self.folder} holds a GGUF file whose layers have sizes of their own, which cannot be compressed "
                    f"again; {again(self.folder)}."
                )
            raise CheckpointError(
                f"{self.folder} holds a GGUF file and no safetensors weights; give {files[0]} itself."
            )
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*")):
            raise CheckpointError(
                f"{self.folder} holds pickled weights that are not called {TORCH_NAME}; save it with save_pretrained "
                "first."
            )
        raise CheckpointError(f"{self.folder} holds no safetensors weights; give the folder of a complete checkpoint.")

    def _read_header(self, shard: str, stated: set[str]) -> None:
        """Read shapes and dtypes of a shard, which holds the `stated` tensors."""
        with _open_shard(self.folder, shard) as handle:
            stored = list(handle.keys())
            for name in sorted(stated.difference(stored)):
                raise CheckpointError(
                    f"{self.folder / shard} lacks {name} though the index names it; download it again."
                )
            for name in stored:
                view = handle.get_slice(name)
                self._shard_of[name] = shard  # of the last one in alphabetical order, as transformers reads them
                self.shapes[name] = tuple(view.get_shape())
                self.dtypes[name] = view.get_dtype()

    def _check_shards(self, stated: Mapping[str, str]) -> None:
        """Refuse a tensor in two shards of which the index names the first one, because readers differ then."""
        for name, place in stated.items():
            if self._shard_of[name] != place:
                raise CheckpointError(
                    f"{name} is stored in {self.folder / place}, which the index names, and in "
                    f"{self._shard_of[name]}, which transformers takes; remove one of both from the files."
                )

    def _take_quantised(self) -> None:
        """Count quantised weights as what they are read as; their parts are not tensors then."""
        self.quantised = find_quantised(self.config, self.shapes, self.dtypes)
        weights = self.quantised.weights
        if not weights:
            return
        self.config = {name: value for name, value in self.config.items() if name != "quantization_config"}
        first = {weight.first: name for name, weight in weights.items()}
        gone = {part for weight in weights.values() for part in weight.parts.values()} - first.keys()
        gone |= {name for name in self.shapes if name.endswith(self.quantised.unused)}
        names = [first.get(name, name) for name in self.shapes if name not in gone]
        self.dtypes = {name: weights[name].dtype if name in weights else self.dtypes[name] for name in names}
        self.shapes = {name: weights[name].shape if name in weights else self.shapes[name] for name in names}

    def _parts(self, stored: str) -> list[str]:
        """Return the names of the tensors that a weight is stored as, the weight's own numbers first."""
        weight = self.quantised.weights.get(stored)
        return [stored] if weight is None else list(weight.parts.values())

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    @property
    def stored_names(self) -> frozenset[str]:
        """Return the names of all tensors in the files, also of those that are not in this view."""
        return frozenset(self._shard_of)

    @property
    def num_parameters(self) -> int:
        """Return the stored parameters: every element of every tensor in the files."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values()) - self._saved[0]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weight files."""
        return sum((self.folder / shard).stat().st_size for shard in set(self._shard_of.values()))

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of the tensors that are in this view of the files."""
        whole = (torch.Size(shape).numel() * ITEM_BYTES[self.dtypes[name]] for name, shape in self.shapes.items())
        return sum(whole) - self._saved[1]

    def renamed(self, names: Mapping[str, str]) -> "Checkpoint":
        """Return a view of the same files with other names, `name -> name so far`; other tensors are not in it."""
        return self._showing({name: (self, so_far) for name, so_far in names.items()})

    def multiplying(
        self, matrices: Mapping[str, QuantisedWeight], names: Mapping[str, str], stated: StackShape, beside_bytes: int
    ) -> "Checkpoint":
        """Return a view of a result of ours of these sizes, whose matrices of low rank are read as whole ones.

        It is counted as it is stored (`counted_whole`: as it is read). `names`: of all other tensors, as in `renamed`.
        """
        view = self.renamed(names)
        view.quantised = replace(self.quantised, weights={**self.quantised.weights, **matrices})
        view.shapes |= {name: matrix.shape for name, matrix in matrices.items()}
        view.dtypes |= {name: matrix.dtype for name, matrix in matrices.items()}
        view._saved = view.num_parameters - self.num_parameters, view.tensor_bytes - self.tensor_bytes
        view.stated, view.beside_bytes = stated, beside_bytes
        return view

    def counted_whole(self) -> "Checkpoint":
        """Return the same view, counted as what it reads."""
        view = copy.copy(self)
        view.stated, view._saved = None, (0, 0)
        return view

    def _showing(self, names: Mapping[str, tuple["Checkpoint", str]]) -> "Checkpoint":
        """Return a view of the same files; of every name, the view that has the tensor and its name there."""
        view = copy.copy(self)
        view._stored_names = {name: other.stored(so_far) for name, (other, so_far) in names.items()}
        view.shapes = {name: other.shapes[so_far] for name, (other, so_far) in names.items()}
        view.dtypes = {name: other.dtypes[so_far] for name, (other, so_far) in names.items()}
        return view

    @property
    def beside(self) -> "Checkpoint | None":
        """Return a view of what is stored beside the model and goes with it; None if nothing does, see `keeping`."""
        if self._beside is None:
            return None
        return self.joined({name: name for name in self._beside.shapes})

    def keeping(self, beside: "Checkpoint") -> "Checkpoint":
        """Return a view of the same tensors that has another view of the files `beside` it, also in its hashes."""
        view = copy.copy(self)
        view._beside = beside
        return view

    def joined(self, names: Mapping[str, str]) -> "Checkpoint":
        """Return a view with other names, as `renamed`, also of what is beside this one; nothing is beside it."""
        other = self if self._beside is None else self._beside
        view = self._showing({name: (self if one in self.shapes else other, one) for name, one in names.items()})
        view._beside = None
        return view

    def without_values(self) -> "Checkpoint":
        """Return a view of the same files whose tensors have a dtype and a shape only (torch's meta device)."""
        view = copy.copy(self)
        view.has_values = False
        return view

    def logging(self) -> "Checkpoint":
        """Return a view of the same files that hashes every tensor which is read from it or from its views."""
        view = copy.copy(self)
        view.log = ReadLog()
        return view

    def log_all(self) -> None:
        """Hash every tensor of this view that was not read yet. Raises as `ReadLog.note`."""
        names = {view.stored(name) for view in (self, self.beside) if view is not None for name in view.shapes}
        names = {part for name in names for part in self._parts(name)}
        for shard in sorted({self._shard_of[name] for name in names}):
            waiting = sorted(name for name in names if self._shard_of[name] == shard)
            while waiting:
                with _open_shard(self.folder, shard) as handle:
                    room = MAPPED_BYTES
                    while waiting and room > 0:
                        room -= self._mapped(handle, waiting.pop()).nbytes

    def _mapped(self, handle: Any, stored: str) -> torch.Tensor:
        """Return a tensor in the mapped file, which is logged: whatever reads values takes them from here."""
        tensor: torch.Tensor = handle.get_tensor(stored)
        if self.log is not None and self.has_values:
            is_large = tensor.nbytes > MAPPED_BYTES
            self.log.note(stored, self.folder / self._shard_of[stored], self._pieces(stored) if is_large else [tensor])
        return tensor

    def _pieces(self, stored: str) -> Iterator[torch.Tensor]:
        """Yield a large tensor in panels of its rows; files are closed in between, as mapped bytes count as memory."""
        start, rows = 0, 1
        while start < rows:
            with _open_shard(self.folder, self._shard_of[stored]) as handle:
                tensor = handle.get_tensor(stored)
                rows = len(tensor)
                stop = start + max(1, MAPPED_BYTES * rows // tensor.nbytes)
                yield tensor[start:stop]
                start = stop

    def content_hash(self) -> str:
        """Return the SHA-256 of every tensor's name, dtype, shape and first row; it tells models apart at once."""
        digest = hashlib.sha256()
        for shard in sorted(set(self._shard_of.values())):
            with _open_shard(self.folder, shard) as handle:
                own = {name: self._parts(self.stored(name))[0] for name in self.shapes}
                for name in sorted(name for name in self.shapes if self._shard_of[own[name]] == shard):
                    digest.update(repr((name, self.dtypes[name], self.shapes[name])).encode())
                    first = handle.get_slice(own[name])[:1] if self.shapes[name] else handle.get_tensor(own[name])
                    digest.update(first.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        if (beside := self.beside) is not None:
            digest.update(beside.content_hash().encode())
        return digest.hexdigest()

    def read(self, names: Iterable[str], into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the named tensors; the files are closed again.

        Args:
            into: tensors that take the values of these names, in place of new ones.

        Raises `CheckpointError` for an unknown name and for weights with NaN or Inf.
        """
        tensors: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            handles: dict[str, Any] = {}
            for name in names:
                stored, mapped = self.stored(name), dict[str, torch.Tensor]()
                weight = self.quantised.weights.get(stored)
                for part in self._parts(stored):
                    shard = self._shard_of.get(part)
                    if shard is None:
                        raise CheckpointError(f"{self.folder} lacks the tensor {name}; the checkpoint is incomplete.")
                    if shard not in handles:
                        handles[shard] = stack.enter_context(_open_shard(self.folder, shard))
                    mapped[part] = self._mapped(handles[shard], part)
                if not self.has_values:
                    described = torch.empty_like(mapped[part], device="meta")
                    if weight is not None:
                        described = torch.empty(weight.shape, dtype=DTYPES[weight.dtype], device="meta")
                    tensors[name] = described
                    continue
                tensor = self._values(stored, mapped, None if into is None else into.get(name))
                if is_damaged(name, tensor):
                    place = self.folder / self._shard_of[part]
                    raise CheckpointError(f"{name} in {place} holds NaN or Inf; give an undamaged checkpoint.")
                tensors[name] = tensor
        return tensors

    def _values(self, stored: str, mapped: Mapping[str, torch.Tensor], place: torch.Tensor | None) -> torch.Tensor:
        """Return a copy of mapped tensors, dequantised: in a place, or in one piece of its own."""
        weight = self.quantised.weights.get(stored)
        if weight is not None:
            tensor = weight.values({role: mapped[part] for role, part in weight.parts.items()})
        elif place is None:
            return mapped[stored].clone(memory_format=torch.contiguous_format)
        else:
            tensor = mapped[stored]
        return tensor if place is None else place.copy_(tensor)

    def read_rows(self, name: str, rows: slice) -> torch.Tensor:
        """Return a copy of some rows of a tensor, which are not checked."""
        if self.log is not None:
            self.map_one(name)
        return next(self.read_panels(name, [rows]))

    def read_panels(self, name: str, panels: Iterable[slice]) -> Iterator[torch.Tensor]:
        """Yield copies of panels of a tensor's rows, which are not checked, from a file that is opened once."""
        stored = self.stored(name)
        if stored in self.quantised.weights:
            whole = self.read_one(name)
            yield from (whole[rows] for rows in panels)
            return
        with _open_shard(self.folder, self._shard_of[stored]) as handle:
            part = handle.get_slice(stored)
            yield from (part[rows].clone() for rows in panels)

    def map_one(self, name: str) -> torch.Tensor:
        """Return one tensor in the mapped file, which is not checked; a copy of quantised weights."""
        stored = self.stored(name)
        if not self.has_values or stored in self.quantised.weights:
            return self.read_one(name)
        with _open_shard(self.folder, self._shard_of[stored]) as handle:
            return self._mapped(handle, stored)

    def read_some(self, name: str, rows: torch.Tensor, columns: slice = slice(None)) -> torch.Tensor:
        """Return a copy of some columns of rows in any order, which are not checked; `rows`: int64, on the host."""
        stored = self.stored(name)
        if stored in self.quantised.weights:
            return self.read_one(name)[rows, columns]
        with _open_shard(self.folder, self._shard_of[stored]) as handle:
            return self._mapped(handle, stored)[:, columns][rows]

    def stored(self, name: str) -> str:
        """Return the name that a tensor has in the files."""
        return self._stored_names.get(name, name)

    def read_one(self, name: str) -> torch.Tensor:
        """Return one tensor, as `read`."""
        return self.read([name])[name]

    def stating(self, **values: Any) -> "Checkpoint":
        """Return a view of the same files whose config states these values."""
        return self.with_config(self.config | values)

    def with_config(self, config: dict[str, Any]) -> "Checkpoint":
        """Return a view of the same files with another config."""
        view = copy.copy(self)
        view.config = config
        return view

    def read_prefix(self, prefix: str, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return all tensors whose names begin with `prefix`, under their names without it; `into` as in `read`."""
        names = [name for name in self.shapes if name.startswith(prefix)]
        places = {f"{prefix}{name}": place for name, place in (into or {}).items()}
        return {name.removeprefix(prefix): tensor for name, tensor in self.read(names, places).items()}


def is_damaged(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor of this name holds NaN, or Inf without being a bound of values.

    The extremes need no temporary of the tensor's size.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return False
    if tensor.dtype.itemsize == 1:  # FP8, of which torch knows no extremes
        tensor = tensor.float()
    extremes = torch.stack(tensor.aminmax())
    return bool(extremes.isnan().any() if name.rpartition(".")[2] in BOUNDS else ~extremes.isfinite().all())


def read_weight_map(folder: Path, index: str) -> dict[str, str]:
    """Return the weight file of every tensor, as an index says.

    Raises `CheckpointError` for an index that is damaged or names something else than weight files beside it.
    """
    path, ending = stored_file(folder, index), INDICES[index]
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map of tensors to files; download it again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not SHARD_NAME.fullmatch(shard) or not shard.endswith(f".{ending}"):
            raise CheckpointError(
                f"{path} says that {name} lies in {repr(shard)[:100]}, which is not a {ending} file of this folder; "
                "download it again."
            )
    return weight_map


def _open_shard(folder: Path, shard: str) -> Any:
    path = stored_file(folder, shard)
    try:
        return TorchFile(path) if path.suffix in (".bin", ".pt") else safe_open(path, framework="pt")
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's own mapping
        unmappable = isinstance(error, MemoryError) or UNMAPPABLE in str(error)
        if unmappable or getattr(error, "errno", None) == errno.ENOMEM:
            size = path.stat().st_size / 2**30
            raise CheckpointError(
                f"{path} ({size:.1f} GiB) cannot be mapped into memory ({cause(error)}); raise the limit of virtual "
                "memory (ulimit -v), or split the file into shards (save_pretrained with max_shard_size)."
            ) from error
        raise CheckpointError(f"{path} is damaged or truncated ({cause(error)}); download it again.") from error
