"""Arcee (AFM): Llama's attention, and an FFN without a gate."""

from dataclasses import replace

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import set_sizes
from oneshot.families.sublayers import FeedForward

_FFN = replace(STACK.sublayers[1], mixer=FeedForward(gate=None))

ARCEE = Description(
    "arcee",
    replace(STACK, sublayers=(STACK.sublayers[0], _FFN)),
    set_sizes,
)
