"""SmolLM3: the Llama layer, without rotary positions in every fourth layer."""

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import set_sizes

SMOLLM3 = Description("smollm3", STACK, set_sizes)
