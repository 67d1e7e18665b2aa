"""Shards and their index: missing, doubled, elsewhere, or beside an adapter; each gives one sentence."""

import json
import os
from typing import Any

import pytest
import torch
from damage import EMBEDDING, message_of
from factories import Fails, MakeCheckpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from oneshot.checkpoint import Checkpoint
from oneshot.checkpoint.reader import INDEX_NAME, SINGLE_NAME


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (None, "no weight_map"),
        ({}, "no weight_map"),
        (["a.safetensors"], "no weight_map"),
        ("a.safetensors", "no weight_map"),
        ({"a": 5}, "lies in 5"),
        ({"a": None}, "lies in None"),
        ({"a": ["b.safetensors"]}, "is not a safetensors file of this folder"),
        ({"a": "../x.safetensors"}, "is not a safetensors file of this folder"),
        ({"a": "/etc/x.safetensors"}, "is not a safetensors file of this folder"),
        ({"a": "sub/x.safetensors"}, "is not a safetensors file of this folder"),
        ({"a": ".."}, "is not a safetensors file of this folder"),
        ({"a": ""}, "is not a safetensors file of this folder"),
        ({"a": "pytorch_model.bin"}, "is not a safetensors file of this folder"),
        ({"a": "x\0.safetensors"}, "is not a safetensors file of this folder"),
        ({"a": "n" * 5000 + ".safetensors"}, "nnn"),
        ({"a\n\x1b[2J": 5}, "a\\n\\x1b[2J"),
    ],
)
def test_an_index_without_valid_shards(weight_map: Any, reason: str, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint(shard_size="20KB")
    (folder / INDEX_NAME).write_text(json.dumps({} if weight_map is None else {"weight_map": weight_map}))
    (folder.parent / "x.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    assert reason in message_of(folder)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_shard_that_is_not_a_file(kind: str, own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint(shard_size="20KB")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.unlink()
    if kind == "folder":
        shard.mkdir()
    else:
        os.mkfifo(shard)
    assert f"{shard} is not a regular file" in fails(folder)


@pytest.mark.parametrize("place", [0, -1])
def test_a_tensor_in_two_shards(place: int, own_checkpoint: MakeCheckpoint) -> None:
    """transformers takes the last of its shards, whatever the index says. Where both agree, it is read."""
    folder = own_checkpoint(shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    name, tensor = next(iter(load_file(shards[place]).items()))
    copy = shards[-1 - place]
    save_file(load_file(copy) | {name: tensor + 1}, copy, metadata={"format": "pt"})
    if place == -1:
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()[name]
        assert torch.equal(loaded, tensor)
        assert torch.equal(Checkpoint(folder).read_one(name), loaded)
        return
    message = message_of(folder)
    assert f"{name} is stored in {shards[0]}, which the index names, and in {copy.name}, which transformers" in message


def test_a_tensor_that_the_index_does_not_name_is_read_as_in_transformers(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint(shard_size="20KB")
    path = folder / INDEX_NAME
    content = json.loads(path.read_text())
    del content["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(content))
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(Checkpoint(folder).read_one("model.norm.weight"), loaded["model.norm.weight"])


def test_the_single_file_comes_before_an_index_as_in_transformers(own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    other = {name: tensor + 1 for name, tensor in load_file(folder / SINGLE_NAME).items()}
    save_file(other, folder / "other.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(other, "other.safetensors")}))
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(Checkpoint(folder).read_one(EMBEDDING), loaded[EMBEDDING])


def test_an_adapter_is_refused(own_checkpoint: MakeCheckpoint) -> None:
    """transformers would load the model that the adapter names, which is another one."""
    folder = own_checkpoint()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}')
    assert "holds an adapter" in message_of(folder)
