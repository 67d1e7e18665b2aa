"""Gemma 2: Gemma 3 without norms of queries and keys; logits and scores are bounded by a hyperbolic tangent."""

from dataclasses import replace
from typing import Any

from oneshot.architecture.description import Description
from oneshot.architecture.resizing import set_sizes
from oneshot.architecture.sublayers import Attention
from oneshot.families.gemma3 import STACK
from oneshot.families.llamas import scaled_embedding

HEAD_CAP = 30.0  # transformers' default


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factor of its embedding and the bound of its logits."""
    return replace(scaled_embedding(family, config), head_cap=config.get("final_logit_softcapping", HEAD_CAP))


GEMMA2 = Description(
    "gemma2",
    replace(STACK, sublayers=(replace(STACK.sublayers[0], mixer=Attention()), STACK.sublayers[1])),
    set_sizes,
    variant=variant,
)
