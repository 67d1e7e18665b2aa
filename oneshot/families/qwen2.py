"""Qwen2 and Qwen2.5: the Llama layer, with biases on q, k and v."""

from dataclasses import replace
from typing import Any

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import NO_FFN_BIASES, set_sizes


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the windows that a config asks for."""
    return replace(family, windowed=bool(config.get("use_sliding_window")))


QWEN2 = Description(
    "qwen2",
    STACK,
    set_sizes,
    variant=variant,
    like_llama=True,
    unsupported={"ffn biases": NO_FFN_BIASES.format("qwen2")},
)
