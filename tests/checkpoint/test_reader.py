"""The lazy reader against safetensors itself."""

from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import Checkpoint
from oneshot.errors import CheckpointError


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the files, by safetensors' own eager reader."""
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


def test_an_unknown_name_is_named(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match="no_such_tensor"):
        Checkpoint(make_checkpoint()).read(["no_such_tensor"])
