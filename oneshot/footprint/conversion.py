"""A GGUF file before it is converted: the headers of the checkpoint that it will become, and what that takes."""

import importlib.util
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint import Checkpoint
from oneshot.config import CompressionConfig
from oneshot.errors import CheckpointError, MemoryLimitError, cause
from oneshot.footprint.bounds import Bounds, refuse_full_disk
from oneshot.records import Footprint
from oneshot.report import gibibytes

FLOAT = 4
CONVERTED_SHARE = 2.0  # of the float32 weights: the model, and what it is read and written through


class GgufHeader(Checkpoint):
    """The checkpoint that a GGUF file will become, known by names and sizes alone; it cannot be read.

    Raises `CheckpointError` where the file is damaged or of another kind.
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
            raise CheckpointError(
                f"{path} cannot be read as GGUF ({cause(error)}); give a complete file of a Llama-like model."
            ) from error
        self.config = json.loads(config.to_json_string(use_diff=False))
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        states = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in states.items()}
        self.dtypes = dict.fromkeys(states, "F32")

    @property
    def num_bytes(self) -> int:
        return FLOAT * sum(math.prod(shape) for shape in self.shapes.values())


def gguf_header(checkpoint: str) -> GgufHeader | None:
    """The header of a GGUF file; None for every other CHECKPOINT, and where the package that reads it is missing."""
    path = Path(os.path.expanduser(checkpoint))  # which lets unknown users and impossible names pass
    if path.suffix != ".gguf" or os.path.isdir(path) or importlib.util.find_spec("gguf") is None:
        return None
    return GgufHeader(path)


def conversion_bytes(header: GgufHeader) -> int:
    """Host memory that the conversion takes."""
    return round(CONVERTED_SHARE * header.num_bytes)


def refuse_conversion(config: CompressionConfig, header: GgufHeader, bounds: Bounds) -> None:
    """Raise `MemoryLimitError` where the whole model, which a conversion holds, is more than may be taken."""
    needed = bounds.host_held + conversion_bytes(header)
    if bounds.host_forced and needed > bounds.host_allowed:
        raise MemoryLimitError(
            f"Converting {config.checkpoint} takes {gibibytes(needed)} of host memory, more than the "
            f"{gibibytes(bounds.host_allowed)} of --max-memory; give a folder of safetensors, or allow at least "
            f"--max-memory {math.ceil(needed * 1.01 / 2**20)}MiB."
        )
    refuse_full_disk(config, header.num_bytes)


def with_conversion(footprint: Footprint, header: GgufHeader | None) -> Footprint:
    """The prediction with the conversion of a GGUF file, which comes before everything else (None: there is none)."""
    if header is None:
        return footprint
    import psutil

    converting = psutil.Process().memory_info().rss + conversion_bytes(header)
    scratch_bytes = footprint.scratch_bytes + header.num_bytes
    if converting <= footprint.host_bytes:
        return replace(footprint, scratch_bytes=scratch_bytes)
    return replace(footprint, host_bytes=converting, host_stage="converting the GGUF file", scratch_bytes=scratch_bytes)
