"""The dtype in which weights are stored.

Q8_0 belongs to GGUF files (`gguf_tensors`). The journal's parts then keep the input's dtype.
"""

import logging
from dataclasses import replace

import torch

from oneshot.checkpoint import Checkpoint, GgufCheckpoint
from oneshot.config import Config, SaveDtype
from oneshot.export.gguf_tensors import BLOCK, BLOCK_BYTES, tell_of_little
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)

SAVED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def with_kept_dtype(config: Config, gguf: GgufCheckpoint | None) -> Config:
    """Return the config with what `keep` means for a GGUF file: its own dtype, and bfloat16 if it is quantised."""
    if gguf is None or config.save_dtype != "keep":
        return config
    return replace(config, save_dtype=gguf.float_dtype)


def expected_bytes(save_dtype: SaveDtype, checkpoint: Checkpoint, parameters: int) -> int:
    """Return the bytes of weight files with so many parameters, without their headers."""
    if save_dtype == "q8_0":
        return round(parameters * BLOCK_BYTES / BLOCK)
    if save_dtype in SAVED_DTYPES:
        return parameters * SAVED_DTYPES[save_dtype].itemsize
    return round(checkpoint.tensor_bytes * parameters / checkpoint.num_parameters)


def part_dtype(save_dtype: SaveDtype) -> SaveDtype:
    """Return the dtype of the journal's parts."""
    return "keep" if save_dtype == "q8_0" else save_dtype


def cast(save_dtype: SaveDtype, tensors: Tensors) -> Tensors:
    """Return the tensors in the dtype of a part; values beyond its range become its largest, with a warning.

    Matrices of which float16 keeps little, or nothing, are also told.
    """
    if part_dtype(save_dtype) == "keep":
        return tensors
    dtype = SAVED_DTYPES[save_dtype]
    largest = torch.finfo(dtype).max
    in_dtype = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            in_dtype[name] = tensor
            continue
        beyond = _beyond(tensor, largest)
        if beyond:
            logger.warning("%s has %d values beyond the range of %s; they are clamped.", name, beyond, save_dtype)
            tensor = torch.where(tensor.isfinite(), tensor.clamp(-largest, largest), tensor)
        in_dtype[name] = tensor.to(dtype)
        if dtype == torch.float16 and tensor.ndim > 1 and tensor.numel() and not tensor.is_meta:
            tell_of_little(name, float(torch.stack(tensor.aminmax()).abs().max()), save_dtype)
    return in_dtype


def _beyond(tensor: torch.Tensor, largest: float) -> int:
    """Return how many finite values are beyond a range; without any, it needs no temporary of the tensor's size."""
    if tensor.is_meta or tensor.numel() == 0 or bool(torch.stack(tensor.aminmax()).abs().max() <= largest):
        return 0  # extremes that are NaN are not below
    return int(((tensor.abs() > largest) & tensor.isfinite()).sum())
