"""Qwen2 and Qwen2.5: the Llama layer, with biases on q, k and v."""

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import NO_FFN_BIASES, set_sizes

QWEN2 = Description(
    "qwen2", STACK, set_sizes, like_llama=True, unsupported={"ffn biases": NO_FFN_BIASES.format("qwen2")}
)
