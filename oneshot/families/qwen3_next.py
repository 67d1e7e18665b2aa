"""Qwen3-Next: gated linear attention in most layers and gated attention in the others, both carried, before experts.

Qwen3.5 has the same mixers before one FFN or experts.
"""

from dataclasses import replace
from typing import Any

from oneshot.architecture.carried import Carried, carried_layers
from oneshot.architecture.description import Description
from oneshot.architecture.experts import Experts
from oneshot.architecture.further import APART, PREFIX
from oneshot.architecture.resizing import set_width
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import FeedForward, Norm, Sublayer
from oneshot.families.mixtures import QWEN2_MOE, named_layers, with_stated_layers

CHUNK = 64  # tokens that the scan of transformers takes together
GATED_ATTENTION = Carried("gated attention", "self_attn.o_proj", attends=True)
MIXERS: dict[str, Carried | None] = {
    "linear_attention": Carried(
        "gated linear attention",
        "linear_attn.out_proj",
        state=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        scan=(("linear_num_value_heads", CHUNK),),
    ),
    "full_attention": None,
}


def stack(ffn: FeedForward | Experts) -> Stack:
    """Return layers with gated attention, whose norms multiply by one plus their weights."""
    return Stack(
        (Sublayer(GATED_ATTENTION), Sublayer(ffn, Norm("post_attention_layernorm", offset=1.0))),
        final_norm=Norm("model.norm", offset=1.0),
    )


def with_linear_attention(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with linear attention in the layers that a config states."""
    return replace(family, carried_layers=carried_layers(config, family.mixers))


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the mixers, the gates and the dense layers that a config states."""
    return with_linear_attention(with_stated_layers(family, config), config)


QWEN3_NEXT = Description(
    "qwen3_next",
    stack(Experts(shared_expert="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")),
    variant=variant,
    with_dense=named_layers,
    sizes=QWEN2_MOE.sizes,
    unused_prefixes=(PREFIX,),
    further=APART,
    mixers=MIXERS,
)
QWEN3_5 = Description(
    "qwen3_5_text",
    stack(FeedForward()),
    set_width,
    variant=with_linear_attention,
    unused_prefixes=(PREFIX,),
    further=APART,
    mixers=MIXERS,
)
QWEN3_5_MOE = Description(
    "qwen3_5_moe_text",
    QWEN3_NEXT.stack,
    variant=with_linear_attention,
    sizes=QWEN3_NEXT.sizes,
    unused_prefixes=(PREFIX,),
    further=APART,
    mixers=MIXERS,
)
