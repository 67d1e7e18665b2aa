"""GPT-NeoX and Pythia: parallel sublayers with two norms; queries, keys and values are one linear, by heads."""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Attention, Description, FeedForward, Norm, Sizes, Stack, Sublayer, set_width

STACK = Stack(
    (
        Sublayer(
            Attention(module="attention", q="attention.q", k="attention.k", v="attention.v", out="attention.dense"),
            Norm("input_layernorm", "layer"),
        ),
        Sublayer(
            FeedForward(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", gate=None, activation="mlp.act"),
            Norm("post_attention_layernorm", "layer"),
        ),
    ),
    layers="gpt_neox.layers",
    embedding="gpt_neox.embed_in.weight",
    final_norm=Norm("gpt_neox.final_layer_norm", "layer"),
    fused={"attention.query_key_value": ("attention.q", "attention.k", "attention.v")},
    parallel=True,
)


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the heads and the residual of a config."""
    parallel, heads = config.get("use_parallel_residual", True), config.get("num_attention_heads", 1)
    return replace(family, stack=replace(family.stack, parallel=bool(parallel), fused_heads=heads))


GPT_NEOX = Description(
    "gpt_neox",
    STACK,
    set_width,
    renamed={"embed_out.weight": "lm_head.weight"},
    sizes=Sizes(num_key_value_heads=None, head_dim=None, norm_epsilon="layer_norm_eps"),
    variant=variant,
    unused=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
