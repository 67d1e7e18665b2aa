"""Ministral 3: the Llama layer, whose queries are scaled by their position."""

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import set_sizes

MINISTRAL3 = Description("ministral3", STACK, set_sizes)
