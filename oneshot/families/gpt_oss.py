"""gpt-oss: experts with biases and a clamped activation, and attention with a sink for every head.

The stock class has gates and ups of an expert in turns, and matrices as `(inputs, outputs)`. Only dequantised weights
are read.
"""

from dataclasses import replace

from oneshot.families.description import Description
from oneshot.families.experts import Experts
from oneshot.families.glm4_moe import mixture
from oneshot.families.mixtures import SIZES, resize
from oneshot.families.sublayers import Attention

_STACK = mixture(Experts(router="mlp.router", router_bias="mlp.router.bias", alternating=True, stored_linears=None))
_FIRST, *_OTHERS = _STACK.sublayers

GPT_OSS = Description(
    "gpt_oss",
    replace(_STACK, sublayers=(replace(_FIRST, mixer=Attention(sinks="self_attn.sinks")), *_OTHERS)),
    resize("intermediate_size"),
    sizes=SIZES,
)
