"""The weight files of a run, into which every part is written at its place, once.

Threads share the tensors of a part: each hashes a piece and writes it while it is in the processor's cache.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from oneshot.checkpoint.layout import Layout, Place
from oneshot.machine.durable import flush, write_whole
from oneshot.tensors import Tensors

CHUNK_BYTES = 2**20
THREADS = 4


class WeightFiles:
    """Write tensors to their places in the files of a layout, and read them from there.

    A part lies on the disk when `write` returns, and a file is whole after `finish`.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def write(self, number: int, tensors: Tensors) -> dict[str, str]:
        """Write a part, flush it to the disk, and return the SHA-256 of every tensor. Raises `OSError`."""
        places = self.layout.parts[number]
        with _opened(places, os.O_RDWR | os.O_CREAT) as files:
            found = _in_threads(lambda place: _write(files[place.path], place, tensors[place.name]), places)
            checksums = dict(zip((place.name for place in places), found, strict=True))
            for file in files.values():
                os.fsync(file)
        for folder in {place.path.parent for place in places}:
            flush(folder)  # a new file's name
        return checksums

    def read(self, number: int) -> Tensors:
        """Return the tensors of a part. Raises `OSError` if a file is too short."""
        places = self.layout.parts[number]
        with _opened(places, os.O_RDONLY) as files:
            return {place.name: _read(files[place.path], place) for place in places}

    def damaged(self, number: int, checksums: dict[str, str]) -> Path | None:
        """Return the first file whose bytes of a part do not have these checksums; None if all have."""
        places = self.layout.parts[number]
        for place in places:
            if place.name not in checksums or not place.path.exists():
                return place.path
        with _opened(places, os.O_RDONLY) as files:
            found = _in_threads(lambda place: _checksum(files[place.path], place), places)
            for place, digest in zip(places, found, strict=True):
                if digest != checksums[place.name]:
                    return place.path
        return None

    def finish(self) -> None:
        """Write the headers and the index of files whose parts are all there. Raises `OSError` if a file is short."""
        for path, header in self.layout.headers.items():
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _write_at(file, memoryview(header), 0)
                if os.fstat(file).st_size != self.layout.file_bytes(path):
                    raise OSError(f"{path} ended early")
                os.fsync(file)
            finally:
                os.close(file)
        for path, content in self.layout.index.items():
            write_whole(path, json.dumps(content, indent=2) + "\n")


def _in_threads(work: Callable[[Place], str], places: Sequence[Place]) -> list[str]:
    if sum(place.num_bytes for place in places) < CHUNK_BYTES:  # threads take longer to start
        return [work(place) for place in places]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as threads:
        return list(threads.map(work, places))


@contextmanager
def _opened(places: Iterable[Place], flags: int) -> Iterator[dict[Path, int]]:
    """Open the files of places for a while -> their descriptors."""
    files: dict[Path, int] = {}
    try:
        for path in {place.path: None for place in places}:
            files[path] = os.open(path, flags, 0o666)
        yield files
    finally:
        for file in files.values():
            os.close(file)


def _write(file: int, place: Place, tensor: torch.Tensor) -> str:
    """Write a tensor to its place and return its SHA-256."""
    digest, start = hashlib.sha256(), place.start
    for piece in _pieces(tensor.detach().to("cpu").contiguous()):
        digest.update(piece)
        _write_at(file, piece, start)
        start += len(piece)
    return digest.hexdigest()


def _write_at(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


def _read(file: int, place: Place) -> torch.Tensor:
    tensor, start = torch.empty(place.shape, dtype=place.dtype), place.start
    for piece in _pieces(tensor):
        while piece:
            count = os.preadv(file, [piece], start)
            if not count:
                raise OSError(f"{place.path} ended early")
            piece, start = piece[count:], start + count
    return tensor


def _checksum(file: int, place: Place) -> str:
    digest, start, end = hashlib.sha256(), place.start, place.start + place.num_bytes
    while start < end:
        piece = os.pread(file, min(CHUNK_BYTES, end - start), start)
        if not piece:
            break  # a file that is too short has another checksum
        digest.update(piece)
        start += len(piece)
    return digest.hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous tensor on the host, piece by piece, in place."""
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]
