"""Quantised checkpoints: FP8 with stored scales is dequantised as it is read, every other kind is refused."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint.card import card_metadata
from oneshot.errors import CheckpointError

SCALE = "_scale_inv"  # behind the name of the weight that its blocks belong to
FP8 = "F8_E4M3"
BYTES = "U8"  # each the exponent of a power of two (E8M0), with an offset of 127
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", BYTES)
UNUSED = ("activation_scale", "input_scale")  # of static quantisation of activations


def scales_of(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> dict[str, str]:
    """Return the name of the scales of every FP8 weight; none if the config states no FP8 that is understood.

    Raises `CheckpointError` for scales that do not fit their weight.
    """
    stated = config.get("quantization_config")
    if not isinstance(stated, dict) or stated.get("quant_method") != "fp8":
        return {}
    block = stated.get("weight_block_size")
    weights = (name for name, dtype in dtypes.items() if dtype == FP8)
    found = {name: name + SCALE for name in weights if dtypes.get(name + SCALE) in SCALE_DTYPES}
    for name, scale in found.items():
        grid = _blocks(shapes[name], block)
        if math.prod(shapes[scale]) != 1 and shapes[scale] != grid:
            raise CheckpointError(
                f"{scale} has shape {shapes[scale]}, which does not fit {name} {shapes[name]} in blocks of {block}, "
                f"whose scales are {grid}; give a checkpoint with one scale for each block, or the unquantised one."
            )
    return found


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


def refuse_quantised(config: Mapping[str, Any], folder: Path) -> None:
    """Raise `CheckpointError` for a config that states quantised weights; it names the original if the card does."""
    stated = next((config[name] for name in ("quantization_config", "compression_config") if config.get(name)), None)
    if stated is None and config.get("quantization_config") is None and config.get("compression_config") is None:
        return
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    origin = card_metadata(folder).get("base_model")
    name = origin[0] if isinstance(origin, list) else origin
    if method == "mxfp4":
        raise CheckpointError(
            "The weights are quantised (mxfp4); load the model in transformers with Mxfp4Config(dequantize=True), save "
            "it in bfloat16, and give that folder."
        )
    raise CheckpointError(
        f"The weights are quantised{f' ({str(method)[:100]})' if method else ''}; give the unquantised checkpoint"
        f"{f', {name} by the model card,' if name else ''} and quantise the result."
    )


def _blocks(shape: tuple[int, ...], block: Any) -> tuple[int, ...] | None:
    """Return the shape of the scales of matrices; None if the blocks' sizes are not two positive integers."""
    if block is None:
        return ()
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        return None
    if len(shape) < 2:
        return None
    return *shape[:-2], *(math.ceil(size / each) for size, each in zip(shape[-2:], block, strict=True))
