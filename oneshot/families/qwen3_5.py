"""Qwen3.5 for text: the mixers of Qwen3-Next, which are carried, before one FFN or experts."""

from typing import Any

from oneshot.families.description import Description
from oneshot.families.mixtures import resize
from oneshot.families.qwen3_next import FURTHER, MIXERS, QWEN3_NEXT, stack, with_linear_attention
from oneshot.families.resizing import set_ffn_width
from oneshot.families.shapes import ModelShape
from oneshot.families.sublayers import FeedForward

FURTHER_LAYERS = "mtp_num_hidden_layers"


def resized(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the stock config of the resized model, without layers for tokens after the next one."""
    return without_further(set_ffn_width("intermediate_size")(config, shape))


def resized_experts(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the same of a mixture of experts."""
    return without_further(resize("moe_intermediate_size")(config, shape))


def without_further(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without layers for tokens after the next one."""
    return config | ({FURTHER_LAYERS: 0} if FURTHER_LAYERS in config else {})


QWEN3_5 = Description(
    "qwen3_5_text",
    stack(FeedForward()),
    resized,
    variant=with_linear_attention,
    unused_prefixes=FURTHER,
    mixers=MIXERS,
)
QWEN3_5_MOE = Description(
    "qwen3_5_moe_text",
    QWEN3_NEXT.stack,
    resized_experts,
    variant=with_linear_attention,
    sizes=QWEN3_NEXT.sizes,
    unused_prefixes=FURTHER,
    mixers=MIXERS,
)
