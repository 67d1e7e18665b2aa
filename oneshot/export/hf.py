"""Tier A, `stock`: a checkpoint that transformers and everything built on it loads with no code of ours; and what every
checkpoint needs beside its weights.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint import Checkpoint
from oneshot.checkpoint_files import companion_files
from oneshot.errors import OutputError
from oneshot.export.per_layer import model_classes


def write_companions(source: Path, target: Path, config: dict[str, Any], *, dtype: str | None) -> None:
    """Write `config.json` and copy the tokenizer, chat template, generation config and licence as they are.

    `dtype` replaces the dtype that the config states; None keeps it.

    Raises `CheckpointError` for a file that leads out of the checkpoint: it would be published with the result.
    """
    if dtype is not None:
        config = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": dtype}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in companion_files(source):
        shutil.copyfile(path, target / path.name)


def stock_config(config: dict[str, Any], *, untied: bool) -> dict[str, Any]:
    """A config without the modelling file that the input may name (`auto_map`): the result is stock."""
    stock = {name: value for name, value in config.items() if name != "auto_map"}
    return stock | {"tie_word_embeddings": False} if untied else stock


def verify(folder: Path) -> Checkpoint:
    """Check that the model class has exactly the tensors written, shape by shape; reads headers only.

    Returns the checkpoint that was written.

    Raises `OutputError` naming the first tensor that does not fit.
    """
    checkpoint = Checkpoint(folder)
    written = checkpoint.shapes
    config_class, model_class = model_classes(checkpoint.config)
    with torch.device("meta"):
        config = config_class.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")
        model = model_class(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name in sorted((expected.keys() | written.keys()) - tied):
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if expected.get(name) != written.get(name):
            raise OutputError(
                f"{name} was written as {written.get(name)} but {type(model).__name__} expects {expected.get(name)}; "
                "please report this with the input's config.json."
            )
    return checkpoint
