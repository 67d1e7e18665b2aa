"""GLM-4 of 2024 (`glm`) and of 2025 (`glm4`): gate and up are one linear; the later has norms inside the branches."""

from dataclasses import replace

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import set_sizes
from oneshot.families.sublayers import FeedForward, Norm

_ATTENTION, _FFN = STACK.sublayers[0], replace(STACK.sublayers[1], mixer=FeedForward(activation="mlp.activation_fn"))
_FUSED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}

GLM = Description(
    "glm",
    replace(STACK, sublayers=(_ATTENTION, _FFN), fused=_FUSED),
    set_sizes,
)
GLM4 = Description(
    "glm4",
    replace(
        STACK,
        sublayers=(
            replace(_ATTENTION, inside=Norm("post_self_attn_layernorm")),
            replace(_FFN, inside=Norm("post_mlp_layernorm")),
        ),
        fused=_FUSED,
    ),
    set_sizes,
)
