"""The kinds of quantised checkpoints that are read, by what their config.json calls them."""

from collections.abc import Mapping
from typing import Any

from oneshot.checkpoint.compressed_tensors import KIND, compressed_weights
from oneshot.checkpoint.fp8 import fp8_weights
from oneshot.checkpoint.gptq import gptq_weights
from oneshot.checkpoint.mxfp4 import mxfp4_weights
from oneshot.checkpoint.quantised import NOT_QUANTISED, QuantisedWeights, Shapes


def find_quantised(config: Mapping[str, Any], shapes: Shapes, dtypes: Mapping[str, str]) -> QuantisedWeights:
    """Return the quantised weights of a checkpoint; none if its config states none of a kind that is understood.

    Raises `CheckpointError` for scales that do not fit their weight, and for variants that are not read.
    """
    stated = config.get("quantization_config")
    if not isinstance(stated, dict):
        return NOT_QUANTISED
    method = stated.get("quant_method")
    if method == "fp8":
        return fp8_weights(stated, shapes, dtypes)
    if method == "mxfp4":
        return mxfp4_weights(shapes, dtypes)
    if method == KIND:
        return compressed_weights(stated, config, shapes, dtypes)
    if method in ("gptq", "awq"):
        return gptq_weights(method, stated, config, shapes, dtypes)
    return NOT_QUANTISED
