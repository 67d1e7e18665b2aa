"""GGUF input: its header before anything is read, and its conversion to safetensors."""

import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint.reader import Checkpoint
from oneshot.errors import CheckpointError, OutputError, cause

FLOAT_BYTES = 4


class GgufHeader(Checkpoint):
    """The checkpoint that a GGUF file will become, with names and sizes only; its tensors cannot be read.

    Raises `CheckpointError` if the file is damaged or of another kind.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if not os.path.isfile(path):
            raise CheckpointError(f"{path} does not exist; check the path.")
        self.folder = path.parent
        try:
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # readers of GGUF raise many unrelated types; the cause is named and chained
            raise _unreadable(path, error) from error
        self.config = json.loads(config.to_json_string(use_diff=False))
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        states = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in states.items()}
        self.dtypes = dict.fromkeys(states, "F32")

    @property
    def num_bytes(self) -> int:
        return FLOAT_BYTES * sum(math.prod(shape) for shape in self.shapes.values())


def gguf_header(checkpoint: str) -> GgufHeader | None:
    """Return the header of a GGUF file; None for every other checkpoint, and without the package that reads it."""
    path = Path(os.path.expanduser(checkpoint))  # unlike Path.expanduser it accepts unknown users
    if path.suffix != ".gguf" or os.path.isdir(path) or importlib.util.find_spec("gguf") is None:
        return None
    return GgufHeader(path)


def convert_gguf(path: Path, scratch: Path) -> Path:
    """Dequantise a GGUF file into its own folder in `scratch`, as float32 safetensors; return the folder.

    It is the only function that holds a whole model in memory.

    Raises `CheckpointError` if the file cannot be read, `OutputError` if the folder cannot be written.
    """
    if importlib.util.find_spec("gguf") is None:  # transformers needs it and only says so after reading the file
        raise CheckpointError(f"Reading {path} needs the package gguf; run pip install 'oneshot[demo]'.")
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # two files of one name may be converted in one scratch folder
    folder = scratch / f"{path.stem}-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]}"
    if (folder / "config.json").exists():
        return folder
    try:
        with _switchable_bar():
            model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # readers of GGUF raise many unrelated types; the cause is named and chained
        raise _unreadable(path, error) from error
    # The weights are plain now; transformers would refuse to save a model that it calls quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{path} cannot be converted in {scratch} ({cause(error)}); free some space there, or name another "
            "folder (--offload-dir, or TMPDIR)."
        ) from error
    config = json.loads((folder / "config.json").read_text())
    if "quantization_config" in config:
        raise CheckpointError(f"{path} could not be dequantised; give a safetensors checkpoint instead.")
    if config.pop("_model_name_or_path", None) is not None:  # the folder of the GGUF file, which says nothing to users
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


@contextmanager
def _switchable_bar() -> Iterator[None]:
    """Let transformers' switch of progress bars also control its bar of dequantisation, which is a plain tqdm."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    plain, reader.tqdm = reader.tqdm, logging.tqdm
    try:
        yield
    finally:
        reader.tqdm = plain


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read as GGUF ({cause(error)}); give a complete file of a Llama-like model."
    )
