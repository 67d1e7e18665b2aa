"""Gemma: Llama's layer, whose norms multiply by one plus their weights, and a scaled embedding."""

from dataclasses import replace
from typing import Any

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import set_sizes
from oneshot.families.sublayers import Norm


def scaled_embedding(family: Description, config: dict[str, Any]) -> Description:
    """Return the family whose embedding is scaled by the square root of the hidden size."""
    scale = float(config.get("hidden_size") or 0) ** 0.5
    return replace(family, stack=replace(family.stack, embedding_scale=scale))


GEMMA = Description(
    "gemma",
    replace(
        STACK,
        sublayers=tuple(replace(each, before=replace(each.norm, offset=1.0)) for each in STACK.sublayers),
        final_norm=Norm("model.norm", offset=1.0),
    ),
    set_sizes,
    variant=scaled_embedding,
)
