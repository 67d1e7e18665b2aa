"""ERNIE 4.5: the Llama layer, whose rotary positions turn neighbouring values, with biases if the config has them."""

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import set_sizes

ERNIE4_5 = Description("ernie4_5", STACK, set_sizes)
