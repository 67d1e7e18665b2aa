"""Journals over small tensors: how tests write them in part or whole, and compare what is on disk."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from oneshot.checkpoint import Journal

Tensors = dict[str, torch.Tensor]
PARTS = [{"a": torch.ones(3), "b": torch.arange(4.0).view(2, 2)}, {"c": torch.full((2,), 3.0)}, {"d": torch.ones(1)}]
# Mixed item sizes: bytes in the order of the parts would leave the int64 tensors at odd places.
MIXED = [
    {"a": torch.ones(3).bfloat16(), "b": torch.arange(5)},
    {"c": torch.ones(1, dtype=torch.int8), "d": torch.randn(7), "e": torch.zeros(0, 4)},
    {},
    {"f": torch.arange(3), "g": torch.randn(3, 3).bfloat16()},
]
FINGERPRINT = {"seed": 0, "options": {"damping": 0.0}}
THREE_FILES = 44  # bytes; MIXED takes three files of at most as many


def open_journal(folder: Path, parts: list[Tensors] = PARTS, *, max_file_bytes: int = 2**62, **options: Any) -> Journal:
    journal = Journal(folder, **{"fingerprint": FINGERPRINT} | options)
    journal.expect(without_values(parts), max_file_bytes=max_file_bytes)
    return journal


def without_values(parts: list[Tensors]) -> list[Tensors]:
    return [{name: tensor.to("meta") for name, tensor in part.items()} for part in parts]


def write(folder: Path, count: int, error: BaseException | None = None, **options: Any) -> None:
    """Add parts up to `count`, then fail, leave or commit."""
    with open_journal(folder, **options) as journal:
        for number in range(journal.num_finished, count):
            journal.add(PARTS[number], record={"number": number}, scaffold=PARTS[0] if number == 1 else None)
        if error is not None:
            raise error
        if count == len(PARTS):
            journal.finish()
            journal.commit()


def write_parts(folder: Path, parts: list[Tensors], **options: Any) -> None:
    """Add the parts that are not finished and commit."""
    with open_journal(folder, parts, **options) as journal:
        for number in range(journal.num_finished, len(parts)):
            journal.add(parts[number])
        journal.finish()
        journal.commit()


def merged(parts: list[Tensors]) -> Tensors:
    return {name: tensor for part in parts for name, tensor in part.items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def all_tensors(folder: Path) -> Tensors:
    """Return the tensors of all files, by safetensors' own eager reader."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded = load_file(path)
        assert not tensors.keys() & loaded.keys(), "every tensor is in one file"
        tensors |= loaded
    return tensors


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
