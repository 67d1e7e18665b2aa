"""Joining safetensors files by their bytes; no tensor is held in memory.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and place of
every tensor) and the tensors' bytes.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_BYTES = 16 * 2**20
LENGTH_BYTES = 8
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its header entry, and where its bytes begin."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    num_bytes: int


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file that this package wrote, in the order of their bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = LENGTH_BYTES + length
    return [
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]), path, data + begin, end - begin)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for begin, end in [entry["data_offsets"]]
    ]


def write_joined(path: Path, tensors: Sequence[StoredTensor], advance: Callable[[int], None]) -> str:
    """Write one file with these tensors and return its SHA-256; `advance` receives the bytes written.

    Wider dtypes come first, so that every tensor begins at a multiple of its item size.
    """
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES.get(tensor.dtype, 1))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        offsets = [end, end + tensor.num_bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        end = offsets[1]
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % LENGTH_BYTES)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(encoded).to_bytes(LENGTH_BYTES, "little"), encoded):
            digest.update(part)
            file.write(part)
        for tensor in ordered:
            with tensor.path.open("rb") as source:
                source.seek(tensor.start)
                missing = tensor.num_bytes
                while missing:
                    chunk = source.read(min(CHUNK_BYTES, missing))
                    if not chunk:
                        raise OSError(f"{tensor.path} ended early")
                    digest.update(chunk)
                    file.write(chunk)
                    missing -= len(chunk)
                    advance(len(chunk))
    return digest.hexdigest()
