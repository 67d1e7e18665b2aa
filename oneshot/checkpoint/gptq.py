"""Weights of GPTQ and AWQ: integers of a few bits, packed into words of 32, with scales and zero points of groups.

GPTQ packs neighbouring inputs, `(inputs × bits / 32, outputs)`, and AWQ (GEMM) eight outputs in an order of its own,
`(inputs, outputs / 8)`. A weight is `scale · (integer − zero point)`, with the scale of its input's group.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from oneshot.checkpoint.dtypes import DTYPES
from oneshot.checkpoint.quantised import (
    NOT_QUANTISED,
    OTHERWISE,
    QuantisedWeight,
    QuantisedWeights,
    Shapes,
    stated_dtype,
)
from oneshot.errors import CheckpointError

OWN, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
ROLES = (OWN, ZEROS, SCALES, GROUPS)
WORD = 32
PANEL = 1024  # outputs that are dequantised together; numbers of 32 bits need many times the memory of words
FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
BITS = {"gptq": (2, 4, 8), "awq": (4,)}
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # of the fields of a word that outputs 0, 1, 2, … are in


def gptq_weights(
    method: str, stated: Mapping[str, Any], config: Mapping[str, Any], shapes: Shapes, dtypes: Mapping[str, str]
) -> QuantisedWeights:
    """Return the weights; they stand for the dtype that the config states.

    Args:
        method: `gptq` or `awq`.

    Raises `CheckpointError` for another format, and for parts that do not fit each other.
    """
    modules = [name.rpartition(".")[0] for name in shapes if name.endswith(f".{OWN}")]
    if not modules:
        return NOT_QUANTISED
    bits, size = stated.get("bits", stated.get("w_bit")), stated.get("group_size", stated.get("q_group_size", 128))
    kinds = [stated.get(key) for key in ("checkpoint_format", "format", "version")]
    kind = str(next((one for one in kinds if one is not None), FORMATS[method][0])).lower()
    if kind not in FORMATS[method] or bits not in BITS[method] or type(size) is not int or not (size > 0 or size == -1):
        raise CheckpointError(
            f"The weights are stored as {kind[:100]} of {method} with {repr(bits)[:20]} bits in groups of "
            f"{repr(size)[:20]}, which is not read; {OTHERWISE}."
        )
    dtype, found = stated_dtype(config), {}
    for module in modules:
        parts = {role: f"{module}.{role}" for role in ROLES if f"{module}.{role}" in shapes}
        shape = _shape(method, module, bits, size, {role: shapes[name] for role, name in parts.items()})
        if any(dtypes[parts[role]] != "I32" for role in (OWN, ZEROS)):
            raise CheckpointError(f"{module}.{OWN} and its {ZEROS} are not words of 32 bits; {OTHERWISE}.")
        of_method = partial(_values, method, module, bits, size, 1 if kind == "gptq" else 0, DTYPES[dtype])
        found[f"{module}.weight"] = QuantisedWeight(parts, shape, dtype, of_method)
    return QuantisedWeights(found, kind=f"{method}, {bits} bits")


def _shape(method: str, module: str, bits: int, size: int, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return `(outputs, inputs)`. Raises `CheckpointError` for parts that are missing or do not fit each other."""
    per_word, own = WORD // bits, stored[OWN]
    if len(own) == 2:
        inputs, outputs = (own[0] * per_word, own[1]) if method == "gptq" else (own[0], own[1] * per_word)
        groups = 1 if size == -1 else math.ceil(inputs / size)
        expected: dict[str, tuple[int, ...]] = {
            ZEROS: (groups, math.ceil(outputs / per_word)),
            SCALES: (groups, outputs),
        }
        expected |= {GROUPS: (inputs,)} if GROUPS in stored else {}
        if all(stored.get(role) == shape for role, shape in expected.items()):
            return outputs, inputs
    raise CheckpointError(
        f"{module} has parts of shapes {dict(stored)}, which do not fit each other in groups of {size}; give a "
        "complete checkpoint."
    )


def _values(
    method: str, module: str, bits: int, size: int, offset: int, dtype: torch.dtype, parts: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the weight `(outputs, inputs)`. `offset`: what is stored of a zero point is less by it."""
    scales, words = parts[SCALES].float(), parts[OWN]
    is_awq, per_word = method == "awq", WORD // bits
    zeros = _in_order(_fields(parts[ZEROS], bits, dim=1), is_awq)
    zeros = (zeros[:, : scales.shape[1]] + offset) & (2**bits - 1)  # 0 is stored as −1, whose bits are all set
    inputs, outputs = (len(words) if is_awq else len(words) * per_word), scales.shape[1]
    groups = torch.arange(inputs) // (inputs if size == -1 else size)
    if GROUPS in parts:
        groups = parts[GROUPS].long()
        if int(groups.min()) < 0 or int(groups.max()) >= len(scales):
            raise CheckpointError(f"{module}.{GROUPS} names groups that have no scales; give a complete checkpoint.")
    weight = torch.empty(outputs, inputs, dtype=dtype)
    for start in range(0, outputs, PANEL):
        panel = slice(start, start + PANEL)
        if is_awq:
            integers = _in_order(_fields(words[:, start // per_word : panel.stop // per_word], bits, dim=1), True)
        else:
            integers = _fields(words[:, panel], bits, dim=0)
        weight[panel] = (scales[groups, panel] * (integers - zeros[groups, panel])).T
    return weight


def _in_order(fields: torch.Tensor, is_awq: bool) -> torch.Tensor:
    """Return numbers in the order of the outputs."""
    return fields.unflatten(1, (-1, len(AWQ_ORDER)))[..., AWQ_ORDER].flatten(1) if is_awq else fields


def _fields(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the numbers that are packed along a dimension, lowest bits first, int32."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    fields = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)  # (…, field)
    return fields.movedim(-1, dim + 1).flatten(dim, dim + 1)
