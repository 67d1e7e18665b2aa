"""The lazy reader against safetensors itself; the writer: all or nothing."""

import json
from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import INDEX_NAME, Checkpoint, CheckpointWriter
from oneshot.errors import CheckpointError, OutputError


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the files, by safetensors' own eager reader."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def open_writer(folder: Path, *, overwrite: bool = False, max_shard_bytes: int = 10**9) -> CheckpointWriter:
    return CheckpointWriter(folder, max_shard_bytes=max_shard_bytes, overwrite=overwrite, expected_bytes=100)


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


@pytest.mark.parametrize("max_shard_bytes", [1, 100, 10**9])
def test_write_and_read_round_trip(max_shard_bytes: int, tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "c": torch.randn(6, 2).T,
        "d": torch.arange(3),
        "e": torch.zeros(0, 4),
    }
    folder = tmp_path / "out"
    with open_writer(folder, max_shard_bytes=max_shard_bytes) as writer:
        writer.add({"a": tensors["a"], "b": tensors["b"]})
        writer.add({name: tensors[name] for name in "cde"})
        writer.finish_weights()
        (writer.partial / "config.json").write_text("{}")
        writer.commit()
    index = json.loads((folder / INDEX_NAME).read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert set(index["weight_map"].values()) == set(shards)
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert len(shards) == {1: 5, 100: 2, 10**9: 1}[max_shard_bytes]
    for shard in shards:
        size = sum(tensor.nbytes for tensor in load_file(folder / shard).values())
        assert size <= max(max_shard_bytes, max(tensor.nbytes for tensor in tensors.values()))
    read = Checkpoint(folder).read(tensors)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    def write_half() -> None:
        with open_writer(tmp_path / "out", max_shard_bytes=1) as writer:
            writer.add({"a": torch.ones(3), "b": torch.ones(3)})
            assert list(writer.partial.iterdir()), "one shard is on disk already"
            assert not (tmp_path / "out").exists()
            raise error

    with pytest.raises(error):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with open_writer(tmp_path / "out") as writer:
        writer.add({"a": torch.ones(3)})
        writer.finish_weights()
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_folder_is_plainly_named(tmp_path: Path) -> None:
    with open_writer(tmp_path / "out"):
        assert [path.name.startswith(".out.incomplete-") for path in tmp_path.iterdir()] == [True]


def test_overwrite_keeps_the_old_folder_until_the_commit(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "old").write_text("old")
    with pytest.raises(OutputError, match="--overwrite"):
        open_writer(folder)

    def fail_late() -> None:
        with open_writer(folder, overwrite=True) as writer:
            writer.add({"a": torch.ones(3)})
            writer.finish_weights()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_late()
    assert [path.name for path in folder.iterdir()] == ["old"]
    with open_writer(folder, overwrite=True) as writer:
        writer.add({"a": torch.ones(3)})
        writer.finish_weights()
        assert (folder / "old").exists()
        writer.commit()
    assert sorted(path.name for path in folder.iterdir()) == ["model-00001-of-00001.safetensors", INDEX_NAME]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_operating_system_error_while_writing_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"), open_writer(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
