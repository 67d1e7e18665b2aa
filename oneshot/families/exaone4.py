"""EXAONE 4: norms inside the branches only, norms of queries and keys, and windows in some layers."""

from dataclasses import replace

from oneshot.families.description import Description
from oneshot.families.olmo2 import STACK
from oneshot.families.resizing import set_sizes
from oneshot.families.sublayers import Attention

_ATTENTION = Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")

EXAONE4 = Description(
    "exaone4",
    replace(STACK, sublayers=(replace(STACK.sublayers[0], mixer=_ATTENTION), STACK.sublayers[1])),
    set_sizes,
)
