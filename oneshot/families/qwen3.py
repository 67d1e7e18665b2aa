"""Qwen3: the Llama layer, with an RMSNorm over each head's query and key, shared by all heads."""

from dataclasses import replace

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.qwen2 import variant
from oneshot.families.resizing import NO_FFN_BIASES, set_sizes
from oneshot.families.sublayers import Attention

_ATTENTION = replace(STACK.sublayers[0], mixer=Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"))

QWEN3 = Description(
    "qwen3",
    replace(STACK, sublayers=(_ATTENTION, STACK.sublayers[1])),
    set_sizes,
    variant=variant,
    like_llama=True,
    unsupported={"ffn biases": NO_FFN_BIASES.format("qwen3")},
)
