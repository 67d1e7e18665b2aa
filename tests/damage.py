"""Ways to damage a copy of a checkpoint, and what opening it then says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import open_model
from oneshot.checkpoint.reader import SINGLE_NAME
from oneshot.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def message_of(folder: Path) -> str:
    """Return the message of the error that opening the folder raises; it is one line."""
    with pytest.raises(CheckpointError) as caught:
        open_model(str(folder), folder)
    message = str(caught.value)
    assert message.isprintable()
    assert message.endswith(".")
    return message


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE_NAME)
    edit(tensors)
    save_file(tensors, folder / SINGLE_NAME)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; those that are given as "removed" go."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value != "removed"}
    (folder / "config.json").write_text(json.dumps(kept))


def turn_bit(path: Path, place: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def replace_by_link(path: Path, target: Path | str) -> None:
    path.unlink()
    path.symlink_to(target)


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def shrink_vocabulary(folder: Path) -> None:
    """Leave 50 tokens, fewer than the tokenizer has."""
    names = (EMBEDDING, "lm_head.weight")
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:50].clone() for name in names}))
    edit_config(folder, vocab_size=50)
