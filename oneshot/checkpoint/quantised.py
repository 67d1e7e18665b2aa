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
SCALE_DTYPES = ("F32", "BF16", "F16")
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
        if len(shapes[name]) != 2 or _blocks(shapes[name], block) != shapes[scale]:
            raise CheckpointError(
                f"{scale} has shape {shapes[scale]}, which does not fit {name} {shapes[name]} in blocks of {block}; "
                "give an undamaged checkpoint."
            )
    return found


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: list[int] | None) -> torch.Tensor:
    """Return FP8 numbers times the scale of their block, bfloat16; `block` None: one scale for all.

    The product is in float32.
    """
    values = weight.float()
    if block is None:
        return (values * scale.float()).bfloat16()
    rows, columns = block
    spread = scale.float().repeat_interleave(rows, 0)[: len(weight)]
    return (values * spread.repeat_interleave(columns, 1)[:, : weight.shape[1]]).bfloat16()


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
    """Return the shape of the scales of a matrix; None if the blocks' sizes are not two positive integers."""
    if block is None:
        return ()
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        return None
    return tuple(math.ceil(size / each) for size, each in zip(shape, block, strict=True))
