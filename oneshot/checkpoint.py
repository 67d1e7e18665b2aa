"""Safetensors checkpoints: a lazy reader that holds a few tensors at a time."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from oneshot.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Checkpoint:
    """A folder with `config.json` and safetensors weights, read tensor by tensor.

    Opening checks that every shard that the index names is there and complete; it reads headers, no weights.

    Raises `CheckpointError` for a missing, empty, damaged or pickled checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_json(folder / "config.json")
        self._shard_of = self._find_shards()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for shard in sorted(set(self._shard_of.values())):
            self._read_header(shard)

    def _find_shards(self) -> dict[str, str]:
        """Tensor name -> shard file name; for a single file the names come from its header."""
        if (self.folder / INDEX_NAME).exists():
            index = _read_json(self.folder / INDEX_NAME)
            weight_map: dict[str, str] = index.get("weight_map", {})
            for shard in sorted(set(weight_map.values())):
                if not (self.folder / shard).exists():
                    raise CheckpointError(
                        f"{self.folder / shard} is missing though the index names it; download it again."
                    )
            return weight_map
        if (self.folder / SINGLE_NAME).exists():
            with _open_shard(self.folder / SINGLE_NAME) as handle:
                return dict.fromkeys(handle.keys(), SINGLE_NAME)
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*")):
            raise CheckpointError(
                f"{self.folder} holds pickled weights, which can run code when read; save it with "
                "save_pretrained(safe_serialization=True) first."
            )
        raise CheckpointError(f"{self.folder} holds no safetensors weights; give the folder of a complete checkpoint.")

    def _read_header(self, shard: str) -> None:
        with _open_shard(self.folder / shard) as handle:
            stored = set(handle.keys())
            for name in (name for name, place in self._shard_of.items() if place == shard):
                if name not in stored:
                    raise CheckpointError(
                        f"{self.folder / shard} lacks {name} though the index names it; download it again."
                    )
                view = handle.get_slice(name)
                self.shapes[name] = tuple(view.get_shape())
                self.dtypes[name] = view.get_dtype()

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    @property
    def num_parameters(self) -> int:
        """Stored parameters: every element of every tensor in the files."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum((self.folder / shard).stat().st_size for shard in set(self._shard_of.values()))

    def content_hash(self) -> str:
        """SHA-256 of every tensor's name, dtype, shape and first row: which model this is, without reading it all."""
        digest = hashlib.sha256()
        for shard in sorted(set(self._shard_of.values())):
            with _open_shard(self.folder / shard) as handle:
                for name in sorted(name for name, place in self._shard_of.items() if place == shard):
                    digest.update(repr((name, self.dtypes[name], self.shapes[name])).encode())
                    first = handle.get_slice(name)[:1] if self.shapes[name] else handle.get_tensor(name)
                    digest.update(first.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The named tensors, copied into memory of their own; the files are closed again.

        Raises `CheckpointError` for an unknown name and for weights with NaN or Inf.
        """
        tensors: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            handles: dict[str, Any] = {}
            for name in names:
                shard = self._shard_of.get(name)
                if shard is None:
                    raise CheckpointError(f"{self.folder} lacks the tensor {name}; the checkpoint is incomplete.")
                if shard not in handles:
                    handles[shard] = stack.enter_context(_open_shard(self.folder / shard))
                tensor = handles[shard].get_tensor(name).clone()
                if tensor.is_floating_point() and not all_finite(tensor):
                    raise CheckpointError(
                        f"{name} in {self.folder / shard} holds NaN or Inf; give an undamaged checkpoint."
                    )
                tensors[name] = tensor
        return tensors

    def read_one(self, name: str) -> torch.Tensor:
        """One tensor, as `read`."""
        return self.read([name])[name]

    def read_prefix(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors whose names begin with `prefix`, under their names without it."""
        names = [name for name in self.shapes if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensor for name, tensor in self.read(names).items()}


def all_finite(tensor: torch.Tensor) -> bool:
    """No NaN and no Inf; by the extremes, which need no temporary of the tensor's size."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or truncated ({error}); download it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing; give the folder of a complete Hugging Face checkpoint.")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again.")
    return content
