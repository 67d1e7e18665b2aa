"""Helium: the Llama layer, whose rotary positions turn neighbouring values; heads are as wide as the hidden size."""

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import FIXED_HEADS_ALONE, set_ffn_width

HELIUM = Description(
    "helium",
    STACK,
    set_ffn_width("intermediate_size"),
    unsupported={"heads": FIXED_HEADS_ALONE.format("helium")},
)
