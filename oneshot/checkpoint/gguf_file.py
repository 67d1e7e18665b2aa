"""The layout of a GGUF file: its metadata, its tensors' places, and their values in float32.

The package gguf reads every string of a vocabulary by itself, which takes seconds to minutes. Here strings of arrays
are only counted. The layout is in ggml's docs/gguf.md.
"""

import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC, VERSIONS = b"GGUF", (2, 3)
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32
FIRST_PART = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.DOTALL)
NUMBER, COUNT, ALL_TENSORS = "split.no", "split.count", "split.tensors.count"  # of parts, counted from 0
PANEL_VALUES = 2**22  # values that are dequantised at once


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: its shape in torch's order, the name of its type, and the place of its bytes."""

    shape: tuple[int, ...]
    kind: str
    start: int
    num_bytes: int


class GgufFile:
    """An opened GGUF file, which may be a part of a model.

    Attributes:
        metadata: key -> number, string or list of numbers; of an array of strings only their number.
        tensors: name -> `GgufTensor`.

    Raises `ValueError` or `struct.error` for a damaged or truncated file, and `OSError` if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes = os.path.getsize(path)
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._bytes[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        _, version, num_tensors, num_keys = self._take("4sIQQ")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key, (kind,) = self._string(), self._take("I")
            self.metadata[key] = self._value(kind)
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", ALIGNMENT))
        begin = -(-self._at // alignment) * alignment
        self.tensors = {name: self._placed(name, shape, kind, begin + offset) for name, shape, kind, offset in entries}

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        if length > self.num_bytes - self._at:
            raise ValueError("it ends early")
        self._at += length
        return self._bytes[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take(_format(kind))[0]
        inner, count = self._take("IQ")
        if inner != STRING:
            if count > self.num_bytes:
                raise ValueError("it ends early")
            return list(self._take(f"{count}{_format(inner)}"))
        for _ in range(count):
            self._at += 8 + struct.unpack_from("<Q", self._bytes, self._at)[0]
        return count

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type and offset of the next tensor."""
        name, (dimensions,) = self._string(), self._take("I")
        if dimensions > 4:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = self._take(f"{dimensions}Q")
        kind, offset = self._take("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        import gguf

        values, type_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if not shape or 0 in shape or shape[-1] % values:
            raise ValueError(f"{name} has the shape {shape}")
        num_bytes = shape[-1] // values * type_bytes
        for size in shape[:-1]:
            num_bytes *= size
        if start + num_bytes > self.num_bytes:
            raise ValueError("it ends early")
        return GgufTensor(shape, gguf.GGMLQuantizationType(kind).name, start, num_bytes)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or some of its rows, dequantised to float32.

        Raises `NotImplementedError` for a type that the package gguf cannot dequantise.
        """
        tensor = self.tensors[name]
        start, stop, _ = rows.indices(tensor.shape[0])
        shape = (stop - start, *tensor.shape[1:])
        if len(tensor.shape) == 1:
            return np.array(self._dequantised(tensor, slice(0, 1))[0][start:stop])
        values = np.empty(shape, np.float32)
        panel = max(1, PANEL_VALUES // max(1, int(np.prod(tensor.shape[1:]))))
        for first in range(start, stop, panel):
            last = min(first + panel, stop)
            values[first - start : last - start] = self._dequantised(tensor, slice(first, last)).reshape(
                -1, *tensor.shape[1:]
            )
        return values

    def _dequantised(self, tensor: GgufTensor, rows: slice) -> np.ndarray:
        import gguf

        count = 1 if len(tensor.shape) == 1 else tensor.shape[0]
        raw = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.start).reshape(count, -1)[rows]
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor.kind])
        return np.asarray(values, np.float32)


class GgufModel:
    """A GGUF file, or all parts of one that was split (`llama-gguf-split`), as one.

    Attributes:
        metadata, tensors: as of `GgufFile`. num_bytes: of all parts. header_bytes: of the first part, before
            its tensors.

    Raises `ValueError` for a part that is missing or of another model, and as `GgufFile`.
    """

    def __init__(self, path: Path) -> None:
        first, paths = GgufFile(path), parts_of(path)
        count = first.metadata.get(COUNT, 1)
        if count > 1 and (first.metadata.get(NUMBER, 0) != 0 or len(paths) != count):
            raise ValueError(f"it is one of {count} parts, of which the first one ends with -00001-of-{count:05d}.gguf")
        self._parts = [first, *(_part(paths[number], first, number) for number in range(1, count))]
        self.metadata, self.num_bytes = first.metadata, sum(part.num_bytes for part in self._parts)
        self.header_bytes = min((tensor.start for tensor in first.tensors.values()), default=first.num_bytes)
        self._part_of: dict[str, GgufFile] = {}
        for part in self._parts:
            for name in part.tensors:
                if self._part_of.setdefault(name, part) is not part:
                    raise ValueError(f"two of its parts have the tensor {name}")
        self.tensors = {name: part.tensors[name] for name, part in self._part_of.items()}
        if len(self.tensors) != first.metadata.get(ALL_TENSORS, len(self.tensors)):
            raise ValueError(f"its parts have {len(self.tensors)} tensors and not {first.metadata[ALL_TENSORS]}")
        if not self.tensors:
            raise ValueError("it has no tensors")

    @property
    def main_kind(self) -> str:
        """Return the type of most of the bytes."""
        by_kind: dict[str, int] = {}
        for tensor in self.tensors.values():
            by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.num_bytes
        return max(by_kind, key=lambda kind: by_kind[kind])

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or some of its rows, as `GgufFile.read`."""
        return self._part_of[name].read(name, rows)


def parts_of(path: Path) -> list[Path]:
    """Return the paths of all parts of a model, by the name of its first part; of any other file its own alone."""
    found = FIRST_PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[2])
    return [path.with_name(f"{found[1]}-{number + 1:05d}-of-{count:05d}.gguf") for number in range(count)]


def _part(beside: Path, first: GgufFile, number: int) -> GgufFile:
    """Return a further part of the model with this `first` part; raises as `GgufModel`."""
    if not beside.is_file():
        raise ValueError(f"its part {beside.name} is missing")
    part = GgufFile(beside)
    stated = first.metadata | {NUMBER: number}
    for key, value in part.metadata.items():
        if stated.get(key) != value:
            raise ValueError(f"{beside.name} is a part of another model: {key} is {value} and not {stated.get(key)}")
    if part.metadata.keys().isdisjoint({NUMBER}):
        raise ValueError(f"{beside.name} is not a part of a model")
    return part


def _format(kind: int) -> str:
    if kind not in FORMATS:
        raise ValueError(f"it has a value of type {kind}")
    return FORMATS[kind]
