"""Mistral: the Llama layer, without biases, with an optional sliding attention window."""

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import NO_FFN_BIASES, set_sizes

MISTRAL = Description(
    "mistral", STACK, set_sizes, like_llama=True, unsupported={"ffn biases": NO_FFN_BIASES.format("mistral")}
)
