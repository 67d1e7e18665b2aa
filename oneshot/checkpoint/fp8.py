"""Weights in FP8 with stored scales, as DeepSeek and Qwen store them."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from oneshot.checkpoint.quantised import NOT_QUANTISED, QuantisedWeight, QuantisedWeights, Shapes
from oneshot.errors import CheckpointError

SCALE = "_scale_inv"  # behind the name of the weight that its blocks belong to
FP8 = "F8_E4M3"
BYTES = "U8"  # each the exponent of a power of two (E8M0), with an offset of 127
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", BYTES)
UNUSED = ("activation_scale", "input_scale")  # of static quantisation of activations


def fp8_weights(stated: Mapping[str, Any], shapes: Shapes, dtypes: Mapping[str, str]) -> QuantisedWeights:
    """Return the FP8 weights that have scales; they stand for bfloat16.

    Raises `CheckpointError` for scales that do not fit their weight.
    """
    block = stated.get("weight_block_size")
    weights = (name for name, dtype in dtypes.items() if dtype == FP8)
    found = {name: name + SCALE for name in weights if dtypes.get(name + SCALE) in SCALE_DTYPES}
    if not found:
        return NOT_QUANTISED
    for name, scale in found.items():
        grid = _blocks(shapes[name], block)
        if math.prod(shapes[scale]) != 1 and shapes[scale] != grid:
            raise CheckpointError(
                f"{scale} has shape {shapes[scale]}, which does not fit {name} {shapes[name]} in blocks of {block}, "
                f"whose scales are {grid}; give a checkpoint with one scale for each block, or the unquantised one."
            )
    values = partial(_values, block)
    made = {
        name: QuantisedWeight({"weight": name, "scale": scale}, shapes[name], "BF16", values)
        for name, scale in found.items()
    }
    return QuantisedWeights(made, UNUSED)


def _values(block: list[int] | None, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return dequantised(parts["weight"], parts["scale"], block)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: list[int] | None) -> torch.Tensor:
    """Return FP8 numbers times the scale of their block, bfloat16; one scale alone is of all numbers.

    The product is in float32. Bytes are exponents of two, as in transformers' `Fp8Dequantize`.
    """
    values = weight.float()
    factors = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if block is None or scale.numel() == 1:
        return (values * factors.reshape(())).bfloat16()
    rows, columns = block
    spread = factors.repeat_interleave(rows, -2)[..., : weight.shape[-2], :]
    return (values * spread.repeat_interleave(columns, -1)[..., : weight.shape[-1]]).bfloat16()


def _blocks(shape: tuple[int, ...], block: Any) -> tuple[int, ...] | None:
    """Return the shape of the scales of matrices; None if the blocks' sizes are not two positive integers."""
    if block is None:
        return ()
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        return None
    if len(shape) < 2:
        return None
    return *shape[:-2], *(math.ceil(size / each) for size, each in zip(shape[-2:], block, strict=True))
