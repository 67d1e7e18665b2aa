"""Granite 3: the Llama layer, with factors for the embedding, attention scores, what sublayers add, and the logits."""

from dataclasses import replace
from typing import Any

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import set_sizes


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factors of a config; that of attention scores is in the stock class alone."""
    stack = replace(
        family.stack,
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
    )
    return replace(family, stack=stack, head_scale=1 / float(config.get("logits_scaling", 1.0)))


GRANITE = Description("granite", STACK, set_sizes, variant=variant)
