"""Ministral and CWM: the Llama layer, with a sliding window in some layers."""

from dataclasses import replace

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import set_sizes

MINISTRAL = Description("ministral", STACK, set_sizes)
CWM = replace(MINISTRAL, model_type="cwm")
