"""Granite 4: state-space models in most layers, which are carried, and attention in the others.

Behind them is one FFN, or experts beside it.
"""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Carried, Description, FeedForward, ModelShape, Sizes
from oneshot.architecture.resizing import set_widths
from oneshot.families.falcon_h1 import SCAN
from oneshot.families.llama import STACK
from oneshot.families.llamas import granite_factors
from oneshot.families.mixtures import GRANITE_MOE

WIDTH = "shared_intermediate_size"
STATE_SPACES = Carried(
    "state-space models", "mamba.out_proj", state=("mamba_n_heads", "mamba_d_head", "mamba_d_state"), scan=SCAN
)
FFN = FeedForward(
    "shared_mlp.up_proj", "shared_mlp.output_linear", "shared_mlp.gate_proj", activation="shared_mlp.activation"
)


def with_both_widths(keys: Sizes, config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the config with the width also as `intermediate_size`, which llama.cpp and mlx-lm read without experts."""
    return set_widths(keys, config, shape) | {"intermediate_size": shape.intermediate_size}


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factors and the experts that a config states."""
    family = granite_factors(family, config)
    experts = GRANITE_MOE.stack.experts
    if config.get("num_local_experts") == 0 or experts is None:
        return replace(family, resize=with_both_widths) if config.get("intermediate_size") == config[WIDTH] else family
    stack = family.stack.with_experts(replace(experts, beside="shared_mlp"))
    sizes = replace(GRANITE_MOE.sizes, shared_expert_width=WIDTH)
    return replace(family, stack=replace(stack, fused={}), sizes=sizes)


GRANITE_HYBRID = Description(
    "granitemoehybrid",
    replace(STACK.with_ffn(FFN), fused={"shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj")}),
    variant=variant,
    sizes=Sizes(intermediate_size=WIDTH),
    # the first two are how older files call them
    mixers={"mamba": STATE_SPACES, "attention": None, "linear_attention": STATE_SPACES, "full_attention": None},
)
