"""Granite 4 without experts: state-space models in most layers, which are carried, and attention in the others.

Its FFN is what stands beside the experts in models that have any.
"""

from dataclasses import replace
from typing import Any

from oneshot.families.carried import Carried, carried_layers
from oneshot.families.description import Description, Sizes
from oneshot.families.granite import variant as granite_variant
from oneshot.families.llama import STACK
from oneshot.families.shapes import ModelShape
from oneshot.families.sublayers import FeedForward

WIDTH = "shared_intermediate_size"
STATE_SPACES = Carried("state-space models", "mamba.out_proj", state=("mamba_n_heads", "mamba_d_head", "mamba_d_state"))
FFN = FeedForward(
    "shared_mlp.up_proj", "shared_mlp.output_linear", "shared_mlp.gate_proj", activation="shared_mlp.activation"
)


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factors and the state-space models that a config states."""
    return replace(granite_variant(family, config), carried_layers=carried_layers(config, family.mixers))


def resized(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the stock config of the resized model."""
    heads = {"num_attention_heads": shape.num_attention_heads, "num_key_value_heads": shape.num_key_value_heads}
    return config | heads | {"head_dim": shape.head_dim, WIDTH: shape.intermediate_size}


GRANITE_HYBRID = Description(
    "granitemoehybrid",
    replace(
        STACK,
        sublayers=(STACK.sublayers[0], replace(STACK.sublayers[1], mixer=FFN)),
        fused={"shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj")},
    ),
    resized,
    variant=variant,
    sizes=Sizes(intermediate_size=WIDTH),
    # the first two are how older files call them
    mixers={"mamba": STATE_SPACES, "attention": None, "linear_attention": STATE_SPACES, "full_attention": None},
)
