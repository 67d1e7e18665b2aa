"""Qwen3.5 for text: the mixers of Qwen3-Next, which are carried, before an FFN."""

from typing import Any

from oneshot.families.description import Description
from oneshot.families.qwen3_next import FURTHER, MIXERS, stack, with_linear_attention
from oneshot.families.resizing import set_ffn_width
from oneshot.families.shapes import ModelShape
from oneshot.families.sublayers import FeedForward

FURTHER_LAYERS = "mtp_num_hidden_layers"


def resized(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the stock config of the resized model, without layers for tokens after the next one."""
    narrow = set_ffn_width("intermediate_size")(config, shape)
    return narrow | ({FURTHER_LAYERS: 0} if FURTHER_LAYERS in config else {})


QWEN3_5 = Description(
    "qwen3_5_text",
    stack(FeedForward()),
    resized,
    variant=with_linear_attention,
    unused_prefixes=FURTHER,
    mixers=MIXERS,
)
