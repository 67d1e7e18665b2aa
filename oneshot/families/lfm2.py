"""LFM2: short convolutions in most layers, which are carried, and attention in the others.

In LFM2-MoE experts follow them, whose gates are sigmoids; its first layers have one FFN.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.nn import functional

from oneshot.architecture.carried import Carried
from oneshot.architecture.description import Description, Sizes
from oneshot.architecture.experts import Experts
from oneshot.architecture.resizing import set_widths
from oneshot.architecture.shapes import ModelShape
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import Attention, FeedForward, Norm, Sublayer
from oneshot.families.mixtures import number_of_layers

ATTENTION = Attention(out="self_attn.out_proj", q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm")
FFN = FeedForward("feed_forward.w3", "feed_forward.w2", "feed_forward.w1", functional.silu)
STACK = Stack(
    (Sublayer(ATTENTION, Norm("operator_norm")), Sublayer(FFN, Norm("ffn_norm"))),
    final_norm=Norm("model.embedding_norm"),
)
SIZES = Sizes(norm_epsilon="norm_eps")
EXPERTS = Experts(
    module="feed_forward",
    router="feed_forward.gate",
    experts="feed_forward.experts",
    scores="sigmoid",
    chosen_by="feed_forward.expert_bias",
    stored_linears=("w1", "w3", "w2"),
)
DENSE = "num_dense_layers"
OTHER_NAME = "block_ff_dim"  # of the FFN's width, which files on the hub also state


def width(config: dict[str, Any]) -> int | None:
    """Return the width that the class makes of the one in a complete config; None if the config states none."""
    stated, multiple = config.get(OTHER_NAME, config.get("intermediate_size")), config.get("block_multiple_of")
    factor = config.get("block_ffn_dim_multiplier")
    if not config.get("block_auto_adjust_ff_dim") or not isinstance(stated, int):
        return stated
    adjusted = int(2 * stated / 3)
    if not isinstance(factor, int | float) or not isinstance(multiple, int) or multiple < 1:
        return adjusted
    return -(-int(factor * adjusted) // multiple) * multiple


def resized(keys: Sizes, config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the stock config of the resized model, which states its FFN's width as it is."""
    widths = set_widths(keys, config, shape) | {"block_auto_adjust_ff_dim": False}
    return widths | ({OTHER_NAME: shape.intermediate_size} if OTHER_NAME in config else {})


LFM2 = Description(
    "lfm2",
    STACK,
    resized,
    sizes=SIZES,
    stated_width=width,
    mixers={
        "conv": Carried("short convolutions", "conv.out_proj", state=("hidden_size", "conv_L_cache")),
        "full_attention": None,
    },
)


def moe_variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the gates and the dense layers that a config states."""
    experts = replace(
        EXPERTS,
        renormalises=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        chosen_by=EXPERTS.chosen_by if config.get("use_expert_bias", True) else None,
    )
    dense = config.get(DENSE)
    return replace(
        family,
        stack=family.stack.with_experts(experts),
        dense_layers=tuple(range(min(dense, number_of_layers(config)) if isinstance(dense, int) else 0)),
    )


def dense_first(flags: Sequence[bool]) -> dict[str, Any]:
    """Return what a config states if the first layers are dense."""
    return {DENSE: sum(flags)}


LFM2_MOE = Description(
    "lfm2_moe",
    replace(STACK.with_experts(EXPERTS), dense_ffn=FFN),
    variant=moe_variant,
    with_dense=dense_first,
    sizes=Sizes(
        intermediate_size="moe_intermediate_size",
        dense_width="intermediate_size",
        num_experts=("num_experts",),
        experts_per_token="num_experts_per_tok",
        norm_epsilon="norm_eps",
    ),
    mixers=LFM2.mixers,
)
