"""The hashes of the tensors that a process has read: whether finished work was made from what the files hold now.

A tensor is hashed when it is first read, while its bytes pass anyway. Finished work is saved with the hashes of all
that was read until then. Whoever continues that work compares what it reads with them, so that no result is made of
two models. A file that only has another time counts as the same.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import xxhash

from oneshot.errors import CheckpointError, OneshotError

CHUNK_BYTES = 2**24
Refusal = Callable[[str], OneshotError]  # from "TENSOR in FILE" to the error


class ReadLog:
    """Hash tensors and compare them with what earlier runs have read. Threads may share it."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._states: dict[str, tuple[int, int, int]] = {}
        self._expected: list[tuple[Mapping[str, str], Refusal]] = []
        self._lock = threading.Lock()

    @property
    def hashes(self) -> dict[str, str]:
        """Return the hash of every tensor that was read, by its stored name."""
        with self._lock:
            return dict(self._found)

    def note(self, name: str, path: Path, pieces: Iterable[torch.Tensor]) -> None:
        """Hash a tensor of a file, unless it was hashed and the file has not been written since.

        `pieces`: consecutive panels of its rows, on the host.

        Raises the error of `expect`, and `CheckpointError` if the tensor has changed since this process read it.
        """
        stat = path.stat()
        state = stat.st_ino, stat.st_size, stat.st_mtime_ns
        with self._lock:
            if self._states.get(name) == state:
                return
        found = tensor_hash(pieces)
        with self._lock:
            earlier = self._found.setdefault(name, found)
            self._places[name], self._states[name] = f"{name} in {path}", state
            expected = list(self._expected)
        if earlier != found:
            raise CheckpointError(f"{name} in {path} changed while this run read it; start it again.")
        for hashes, refusal in expected:
            if hashes.get(name, found) != found:
                raise refusal(self._places[name])

    def expect(self, hashes: Mapping[str, str], refusal: Refusal) -> None:
        """Compare all that was read and will be read with the hashes of an earlier run. Raises what `refusal` makes."""
        with self._lock:
            self._expected.append((hashes, refusal))
            found = dict(self._found)
        for name in found.keys() & hashes.keys():
            if found[name] != hashes[name]:
                raise refusal(self._places[name])


def tensor_hash(pieces: Iterable[torch.Tensor]) -> str:
    """Return a hash of the dtype, row shape and bytes of a tensor (XXH3, 128 bits: as fast as memory is read)."""
    digest = xxhash.xxh3_128()
    for number, piece in enumerate(pieces):
        if number == 0:
            digest.update(f"{piece.dtype} {list(piece.shape[1:])}".encode())
        data = piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            digest.update(data[start : start + CHUNK_BYTES])
    return digest.hexdigest()
