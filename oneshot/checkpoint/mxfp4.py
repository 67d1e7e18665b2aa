"""Weights in MXFP4, as gpt-oss is published: two numbers of four bits in a byte, and an exponent for 32 of them."""

from collections.abc import Mapping

import torch

from oneshot.checkpoint.quantised import NOT_QUANTISED, QuantisedWeight, QuantisedWeights, Shapes
from oneshot.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"  # behind the name of a weight
BYTES = "U8"
BLOCK_BYTES = 16  # of 32 numbers


def mxfp4_weights(shapes: Shapes, dtypes: Mapping[str, str]) -> QuantisedWeights:
    """Return the weights `(experts, inputs, outputs)` of blocks `(experts, outputs, groups, 16)`; they are bfloat16.

    bfloat16 holds each of the numbers exactly.

    Raises `CheckpointError` for scales that do not fit their blocks.
    """
    found = {}
    for blocks in (name for name, dtype in dtypes.items() if name.endswith(BLOCKS) and dtype == BYTES):
        name, shape = blocks.removesuffix(BLOCKS), shapes[blocks]
        scales, expected = name + SCALES, shape[:-1]
        if scales not in shapes:
            raise CheckpointError(f"{scales} is missing; give a complete checkpoint.")
        if len(shape) != 4 or shape[-1] != BLOCK_BYTES or shapes[scales] != expected or dtypes[scales] != BYTES:
            raise CheckpointError(
                f"{scales} has shape {shapes[scales]}, which does not fit {blocks} {shape}, whose exponents are "
                f"bytes {expected}; give a complete checkpoint."
            )
        experts, outputs, groups, _ = shape
        parts = {"blocks": blocks, "scales": scales}
        found[name] = QuantisedWeight(parts, (experts, 2 * BLOCK_BYTES * groups, outputs), "BF16", _values)
    return QuantisedWeights(found, kind="mxfp4") if found else NOT_QUANTISED


def _values(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weight; one expert at a time, because transformers' function holds several copies."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = parts["blocks"], parts["scales"]
    experts, outputs, groups, _ = blocks.shape
    weight = torch.empty(experts, 2 * BLOCK_BYTES * groups, outputs, dtype=torch.bfloat16)
    for expert in range(experts):
        one = slice(expert, expert + 1)
        weight[one] = convert_moe_packed_tensors(blocks[one], scales[one], dtype=torch.bfloat16)
    return weight
