"""Hunyuan, the dense models: the Llama layer, with norms of queries and keys after the rotation."""

from dataclasses import replace

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import set_sizes
from oneshot.families.sublayers import Attention

_ATTENTION = Attention(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")

HUNYUAN = Description(
    "hunyuan_v1_dense",
    replace(STACK, sublayers=(replace(STACK.sublayers[0], mixer=_ATTENTION), STACK.sublayers[1])),
    set_sizes,
)
