"""The lazy reader against safetensors itself, and files that the system cannot map."""

import errno
import json
import os
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint
from families.cases import CASES
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oneshot.architecture import from_files
from oneshot.checkpoint import Checkpoint, open_model
from oneshot.errors import CheckpointError


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor in the files, by safetensors' own eager reader."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_equals_safetensors(shard_size: str, dtype: torch.dtype, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(shard_size=shard_size, dtype=dtype)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    wanted = all_tensors(folder)
    checkpoint = Checkpoint(folder)
    assert checkpoint.tensor_names == wanted.keys()
    assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    assert checkpoint.num_parameters == sum(tensor.numel() for tensor in wanted.values())
    assert checkpoint.num_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    read = checkpoint.read(sorted(wanted))
    assert all(torch.equal(read[name], tensor) and read[name].dtype == dtype for name, tensor in wanted.items())
    layer = checkpoint.read_prefix("model.layers.1.")
    assert {f"model.layers.1.{name}" for name in layer} == {name for name in wanted if ".layers.1." in name}


def test_a_prefix_is_not_confused_with_a_longer_number(tmp_path: Path) -> None:
    names = ["model.layers.1.a", "model.layers.10.a"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert list(Checkpoint(tmp_path).read_prefix("model.layers.1.")) == ["a"]


@torch.inference_mode()
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("name", "may_be_infinite"), [("a.input_max", True), ("a.scale", False), ("input_max.a", False)]
)
@pytest.mark.parametrize("size", [(), (2, 3)])
def test_damaged_values_are_refused_and_bounds_may_be_infinite(
    value: float, name: str, may_be_infinite: bool, size: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensor = torch.zeros(size)
    tensor.view(-1)[-1] = value
    save_file({name: tensor}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    if may_be_infinite and value == value:
        assert torch.equal(checkpoint.read([name])[name], tensor)
    else:
        with pytest.raises(CheckpointError, match=f"{name}.*NaN or Inf"):
            checkpoint.read([name])


def test_experts_are_read_to_where_they_are_stacked(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A layer that is read is what its tensors by themselves become, and no second copy of the experts is made."""
    model = open_model(str(make_checkpoint(**CASES["mixtral"].options)), tmp_path)
    stack = model.family.stack_of(1)
    apart = model.checkpoint.read_prefix(stack.layer_prefix(1))
    read, expected = model.read_layer(1), from_files(apart, stack)
    assert read.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())
    assert stack.experts is not None
    whole, places = stack.experts.stacked(apart)
    found = model.checkpoint.read_prefix(stack.layer_prefix(1), places)
    assert all(found[name] is place for name, place in places.items())
    assert whole.keys() == {stack.experts.gate_up, stack.experts.down}
    name = next(iter(places))
    with pytest.raises(CheckpointError, match="different dtypes"):
        stack.experts.stacked(apart | {name: apart[name].half()})


def test_an_unknown_name_is_named(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match="no_such_tensor"):
        Checkpoint(make_checkpoint()).read(["no_such_tensor"])


def large_checkpoint(folder: Path, gibibytes: int) -> Path:
    """Write a checkpoint of one tensor, a hole in a file, which takes no space on the disk."""
    num_bytes = gibibytes * 2**30
    header = json.dumps({"a": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, path.stat().st_size + num_bytes)
    (folder / "config.json").write_text("{}")
    return path


def message_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    message = str(caught.value)
    assert message.isprintable()
    assert message.endswith(".")
    return message


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("unable to mmap 3221225480 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("unable to mmap 3221225480 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        MemoryError("Cannot allocate memory (os error 12)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_file_that_cannot_be_mapped(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not damaged, so the remedy is more address space or smaller files."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    path = large_checkpoint(tmp_path, gibibytes=3)
    monkeypatch.setattr("oneshot.checkpoint.reader.safe_open", fail)
    message = message_of(tmp_path)
    assert message.startswith(f"{path} (3.0 GiB) cannot be mapped into memory (")
    assert "annot allocate memory" in message
    assert "ulimit -v" in message
    assert "max_shard_size" in message
    assert "damaged" not in message


@pytest.mark.parametrize("room_gibibytes", [1, 9])
def test_a_file_larger_than_the_address_space(room_gibibytes: int, tmp_path: Path) -> None:
    """The system itself refuses the map of safetensors (1 GiB of room) or the second map of torch (9 GiB)."""
    path = large_checkpoint(tmp_path, gibibytes=8)
    assert Checkpoint(tmp_path).num_parameters == 2**31
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room_gibibytes * 2**30, hard))
    try:
        message = message_of(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert message.startswith(f"{path} (8.0 GiB) cannot be mapped into memory (")
    assert "ulimit -v" in message
