"""Phi-3, Phi-3.5 and Phi-4: Llama's layer, whose queries, keys and values are one linear, as are gate and up."""

from dataclasses import replace
from typing import Any

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import NO_FFN_BIASES, NO_HIDDEN_SIZE, set_sizes
from oneshot.families.sublayers import FeedForward


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the forms that hold the window and the rotary positions of a config."""
    family = replace(family, windowed=bool(config.get("sliding_window")))
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = config.get("partial_rotary_factor") or rotary.get("partial_rotary_factor") or 1.0
    if rotary.get("rope_type", rotary.get("type", "default")) == "default" and share == 1.0:
        return family
    return replace(family, like_llama=False)


PHI3 = Description(
    "phi3",
    replace(
        STACK,
        sublayers=(
            STACK.sublayers[0],
            replace(STACK.sublayers[1], mixer=FeedForward(activation="mlp.activation_fn")),
        ),
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
    set_sizes,
    variant=variant,
    like_llama=True,
    unsupported={"ffn biases": NO_FFN_BIASES.format("phi3"), "hidden size": NO_HIDDEN_SIZE.format("phi3")},
)
