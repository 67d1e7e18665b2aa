"""The layout of a result: the file and the bytes of every tensor, known before the tensor is computed.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and place of
every tensor) and the tensors' bytes. A result is one `model.safetensors` if it is small enough, else numbered files
with an index, as transformers names them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint.dtypes import DTYPE_NAMES, RANKS
from oneshot.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from oneshot.errors import OutputError

LENGTH_BYTES = 8

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """The place of a tensor: its file, and its first byte there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    start: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The places of all tensors.

    Attributes:
        parts: groups of tensors that a run finishes together, in its order.
        headers: first bytes of every file. index: index of several files by its path; empty for one file.
    """

    parts: tuple[tuple[Place, ...], ...]
    headers: dict[Path, bytes]
    index: dict[Path, dict[str, Any]]

    @property
    def places(self) -> list[Place]:
        """Return the places of all parts, in order."""
        return [place for part in self.parts for place in part]

    def file_bytes(self, path: Path) -> int:
        """Return the size of a file."""
        ends = (place.start + place.num_bytes for place in self.places if place.path == path)
        return max(ends, default=len(self.headers[path]))

    def refuse_other(self, number: int, tensors: Tensors) -> None:
        """Raise `OutputError` unless a part has exactly the tensors that the layout has a place for."""
        planned = {place.name: (place.dtype, place.shape) for place in self.parts[number]}
        made = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        for name in sorted(planned.keys() | made.keys()):
            if planned.get(name) != made.get(name):
                raise OutputError(
                    f"{name} was made as {_said(made.get(name))} but planned as {_said(planned.get(name))}; please "
                    "report this with the input's config.json."
                )


def lay_out(parts: Sequence[Tensors], folder: Path, max_file_bytes: int) -> Layout:
    """Return the layout of files in `folder`, each with tensors of at most `max_file_bytes`, or one larger tensor.

    Within a file wider dtypes come first, so that every tensor begins at a multiple of its item size.

    Args:
        parts: tensors with or without values (on torch's meta device).
    """
    in_order = [_in_order(part, folder) for part in parts]
    ordered = [place for part in in_order for place in part]
    groups, found = _groups(ordered, max_file_bytes), dict[str, Place]()
    files = [folder / name for name in _file_names(len(groups))]
    headers = {}
    for path, group in zip(files, groups, strict=True):
        widest_first = sorted(group, key=lambda place: -place.dtype.itemsize)
        headers[path] = _header(widest_first)
        end = len(headers[path])
        for place in widest_first:
            found[place.name] = replace(place, path=path, start=end)
            end += place.num_bytes
    index = {}
    if len(files) > 1:
        total = sum(place.num_bytes for place in ordered)
        weight_map = {place.name: found[place.name].path.name for place in ordered}
        index[folder / INDEX_NAME] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return Layout(tuple(tuple(found[place.name] for place in part) for part in in_order), headers, index)


def _in_order(part: Tensors, folder: Path) -> list[Place]:
    """Return the tensors of a part in the order of the safetensors library, without a place yet."""
    named = sorted(part.items(), key=lambda item: (-RANKS[item[1].dtype], item[0]))
    return [Place(name, tensor.dtype, tuple(tensor.shape), folder, 0) for name, tensor in named]


def _groups(places: Sequence[Place], max_bytes: int) -> list[list[Place]]:
    """Return groups in order, each of at most `max_bytes`; a larger tensor is a group of its own."""
    groups: list[list[Place]] = []
    room = 0
    for place in places:
        if not groups or place.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(place)
        room -= place.num_bytes
    return groups


def _file_names(count: int) -> list[str]:
    """Return the names that transformers gives to the weight files of a checkpoint."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _header(places: Sequence[Place]) -> bytes:
    """Return the length and the header of a file that has these tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for place in places:
        offsets = [end, end + place.num_bytes]
        header[place.name] = {"dtype": DTYPE_NAMES[place.dtype], "shape": place.shape, "data_offsets": offsets}
        end = offsets[1]
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % LENGTH_BYTES)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def _said(tensor: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[0]} {list(tensor[1])}".removeprefix("torch.")
