"""Mistral: the Llama layer, without biases, with an optional sliding attention window."""

from dataclasses import replace
from typing import Any

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import NO_FFN_BIASES, set_sizes

WINDOW = 4096  # transformers' default


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the window of a config."""
    return replace(family, windowed=bool(config.get("sliding_window", WINDOW)))


MISTRAL = Description(
    "mistral",
    STACK,
    set_sizes,
    variant=variant,
    like_llama=True,
    unsupported={"ffn biases": NO_FFN_BIASES.format("mistral")},
)
