"""dots.llm1: DeepSeek-V3's experts with the attention of Qwen3."""

from dataclasses import replace

from oneshot.families.glm4_moe import GLM4_MOE, routed
from oneshot.families.sublayers import Attention

_FIRST, *_OTHERS = GLM4_MOE.stack.sublayers
_ATTENTION = Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")

DOTS1 = replace(
    GLM4_MOE,
    model_type="dots1",
    stack=replace(GLM4_MOE.stack, sublayers=(replace(_FIRST, mixer=_ATTENTION), *_OTHERS)),
    variant=routed,
)
