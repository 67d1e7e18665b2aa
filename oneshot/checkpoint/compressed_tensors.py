"""Weights of compressed-tensors, as llm-compressor writes them, through that package's own functions."""

import math
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from operator import itemgetter
from types import EllipsisType
from typing import Any

import torch

from oneshot.checkpoint.dtypes import DTYPES, WEIGHT_DTYPES
from oneshot.checkpoint.quantised import (
    NOT_QUANTISED,
    OTHERWISE,
    QuantisedWeight,
    QuantisedWeights,
    Shapes,
    stated_dtype,
)
from oneshot.errors import CheckpointError, cause

NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
KIND = "compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", NVFP4, MXFP4)
PACKED, SCALE, ZERO, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
ROLES = (PACKED, "weight", SCALE, ZERO, SHAPE, "weight_global_scale")  # the weight's own numbers first
ORDER = "weight_g_idx"
ROUNDED = ("I8", "F8_E4M3")  # of weights that are not packed
# of activations, of keys and values
UNUSED = tuple(
    f".{name}_{kind}" for name in ("input", "output", "k", "v", "q") for kind in ("scale", "zero_point", "global_scale")
)
WORD = 32
PANEL = 1024  # rows that are dequantised together, because that needs many times the memory of the packed ones


def rounds_inputs(config: Mapping[str, Any]) -> bool:
    """Return whether linears of a config.json also round what they read, which a dequantised weight does not."""
    stated = config.get("quantization_config") or {}
    return stated.get("quant_method") == KIND and any(group.input_activations for group in _groups(stated))


def compressed_weights(
    stated: Mapping[str, Any], config: Mapping[str, Any], shapes: Shapes, dtypes: Mapping[str, str]
) -> QuantisedWeights:
    """Return the weights in integers, FP8, or packed in four bits; they stand for the dtype that the config states.

    A model that has run in transformers has dequantised weights beside their scales, also where it is saved.

    Raises `CheckpointError` for another format, for scales that do not fit, and without the package.
    """
    modules = {name.rpartition(".")[0] for name in shapes if name.endswith(f".{SCALE}")}
    if not modules:
        return NOT_QUANTISED
    for name in sorted(shapes):
        module, _, role = name.rpartition(".")
        is_rounded = role == PACKED or (role == "weight" and dtypes.get(name) in ROUNDED)
        if is_rounded and module not in modules:
            raise CheckpointError(f"{module}.{SCALE} is missing; give a complete checkpoint.")
    scheme_of = _schemes(stated)
    dtype = stated_dtype(config)
    found, kinds = {}, set()
    for module in sorted(modules):
        if f"{module}.{ORDER}" in shapes:
            raise CheckpointError(f"{module}.{ORDER} states an order of its inputs, which is not read; {OTHERWISE}.")
        parts = {role: f"{module}.{role}" for role in ROLES if f"{module}.{role}" in shapes}
        scheme, kind = scheme_of(module)
        kinds.add(kind)
        weight = f"{module}.weight"
        if PACKED not in parts and dtypes.get(weight) in WEIGHT_DTYPES:
            if stated.get("quantization_status") != "decompressed":
                raise CheckpointError(f"{weight} is stored as {dtypes[weight]} beside a scale; {OTHERWISE}.")
            found[weight] = QuantisedWeight(parts, shapes[weight], dtypes[weight], itemgetter("weight"))
            continue
        shape = _shape(module, scheme.weights, kind, {role: shapes[name] for role, name in parts.items()})
        values = partial(_values, module, scheme, kind, shape, DTYPES[dtype])
        found[weight] = QuantisedWeight(parts, shape, dtype, values)
    return QuantisedWeights(found, UNUSED, f"compressed-tensors, {' and '.join(sorted(kinds))}")


def _groups(stated: Mapping[str, Any]) -> list[Any]:
    """Return the groups of linears and their schemes. Raises `CheckpointError` for what is not understood."""
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError as error:
        raise CheckpointError(
            "Reading weights of compressed-tensors needs that package; run pip install 'oneshot-llm[compressed]'."
        ) from error
    try:
        return list(QuantizationConfig.model_validate(dict(stated)).config_groups.values())
    except ValueError as error:
        raise CheckpointError(
            f"The quantization_config is not understood by compressed-tensors ({cause(error)}); {OTHERWISE}."
        ) from error


def _schemes(stated: Mapping[str, Any]) -> Any:
    """Return `module -> (scheme, format)`. Raises `CheckpointError` for what is not read."""
    groups = _groups(stated)
    from compressed_tensors.utils.match import match_name

    for key in ("transform_config", "sparsity_config"):
        if stated.get(key):
            raise CheckpointError(f"The weights of compressed-tensors have a {key}, which is not read; {OTHERWISE}.")

    def scheme_of(module: str) -> tuple[Any, str]:
        """Return the scheme whose targets name the module, or else the one for all modules of a class."""
        named = [one for one in groups if any(match_name(module, target) for target in one.targets)]
        classes = [one for one in groups if any(not target.startswith("re:") for target in one.targets)]
        found = named or classes
        if len(found) != 1 or found[0].weights is None:
            raise CheckpointError(f"{len(found)} groups of the quantization_config hold {module}; {OTHERWISE}.")
        kind = str(getattr(found[0].format, "value", found[0].format) or stated.get("format"))
        if kind not in FORMATS:
            raise CheckpointError(
                f"{module} is stored as {kind[:100]} of compressed-tensors, which is not read; {OTHERWISE}."
            )
        return found[0], kind

    return scheme_of


def _shape(module: str, weights: Any, kind: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a weight. Raises `CheckpointError` for parts that are missing or do not fit each other."""
    own, scale = stored.get(PACKED, stored.get("weight")), stored[SCALE]
    is_packed = kind in ("pack-quantized", NVFP4, MXFP4)
    strategy = str(getattr(weights.strategy, "value", weights.strategy))
    if own is None or len(own) != 2 or is_packed != (PACKED in stored):
        raise CheckpointError(f"{module} has no matrix of weights that fits {kind}; give a complete checkpoint.")
    rows, columns = own
    if kind in (NVFP4, MXFP4):
        columns *= 2
    elif is_packed:
        words, columns = columns, columns * 32 // weights.num_bits
        in_groups = scale[1] * weights.group_size if strategy == "group" and len(scale) == 2 else columns
        if math.ceil(in_groups * weights.num_bits / 32) == words:  # the last word need not be full
            columns = in_groups
    expected: dict[str, tuple[tuple[int, ...], ...]] = {"tensor": ((), (1,), (1, 1)), "channel": ((rows, 1), (rows,))}
    if strategy in ("group", "tensor_group"):
        expected[strategy] = ((rows, math.ceil(columns / weights.group_size)),)
    elif strategy == "block":
        height, width = weights.block_structure
        expected[strategy] = ((math.ceil(rows / height), math.ceil(columns / width)),)
    fitting = expected.get(strategy, ())
    if scale not in fitting:
        raise CheckpointError(
            f"{module}.{SCALE} has shape {scale}, which does not fit {strategy} scales of {rows} × {columns} weights; "
            "give a complete checkpoint."
        )
    needed = {"pack-quantized": [SHAPE], NVFP4: ["weight_global_scale"]}.get(kind, [])
    if not weights.symmetric:
        needed.append(ZERO)
    for missing in needed:
        if missing not in stored:
            raise CheckpointError(f"{module}.{missing} is missing; give a complete checkpoint.")
    if not weights.symmetric:
        zeros = (math.ceil(rows * weights.num_bits / 32), scale[1]) if is_packed else scale
        if stored[ZERO] != zeros:
            raise CheckpointError(
                f"{module}.{ZERO} has shape {stored[ZERO]} where {zeros} is expected; give a complete checkpoint."
            )
    return rows, columns


def _values(
    module: str, scheme: Any, kind: str, shape: tuple[int, ...], dtype: torch.dtype, parts: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return what compressed-tensors makes of a module's parts."""
    from compressed_tensors.compressors import BaseCompressor

    stated = parts.get(SHAPE)
    if stated is not None and tuple(stated.tolist()) != shape:
        raise CheckpointError(
            f"{module}.{SHAPE} states {stated.tolist()} where {list(shape)} are stored; give a complete checkpoint."
        )
    compressor: Any = BaseCompressor.get_value_from_registry(kind)
    rows, columns = shape
    weight, panel = torch.empty(shape, dtype=dtype), _panel_rows(scheme.weights)
    starts = range(0, max(1, rows - panel + 1), panel)
    for start, stop in pairwise((*starts, rows)):  # the last one has the rest: few rows fail in the package
        of_rows = {role: part[_rows_of(role, part, start, stop, scheme.weights, kind)] for role, part in parts.items()}
        if SHAPE in parts:
            of_rows[SHAPE] = torch.tensor([stop - start, columns])
        try:
            weight[start:stop] = compressor.decompress(of_rows, scheme)["weight"]
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"compressed-tensors cannot dequantise {module} ({cause(error)}); {OTHERWISE}."
            ) from error
    return weight


def _panel_rows(weights: Any) -> int:
    """Return how many rows are dequantised together: whole words of zero points, and whole blocks."""
    height = 1 if weights.block_structure is None else weights.block_structure[0]
    each = math.lcm(WORD, height)
    return each * max(1, PANEL // each)


def _rows_of(role: str, part: torch.Tensor, start: int, stop: int, weights: Any, kind: str) -> slice | EllipsisType:
    """Return where a part has what belongs to some rows of a weight; everything of a scale of all rows."""
    if role == "weight_global_scale" or (role in (SCALE, ZERO) and part.numel() == 1):
        return ...
    if role == ZERO and kind == "pack-quantized":
        return slice(start * weights.num_bits // WORD, math.ceil(stop * weights.num_bits / WORD))
    if role in (SCALE, ZERO) and weights.block_structure is not None:
        height = weights.block_structure[0]
        return slice(start // height, math.ceil(stop / height))
    return slice(start, stop)
