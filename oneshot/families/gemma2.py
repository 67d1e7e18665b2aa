"""Gemma 2: Gemma 3 without norms of queries and keys; logits and scores are bounded by a hyperbolic tangent."""

from dataclasses import replace

from oneshot.families.description import Description
from oneshot.families.gemma import scaled_embedding
from oneshot.families.gemma3 import STACK
from oneshot.families.resizing import set_sizes
from oneshot.families.sublayers import Attention

GEMMA2 = Description(
    "gemma2",
    replace(STACK, sublayers=(replace(STACK.sublayers[0], mixer=Attention()), STACK.sublayers[1])),
    set_sizes,
    variant=scaled_embedding,
)
