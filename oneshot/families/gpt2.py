"""GPT-2 and GPTBigCode (StarCoder 1): learned positions, LayerNorms, biases, and fused queries, keys and values.

GPT-2 stores the weights of its layers as `(inputs, outputs)`; GPTBigCode has one KV head.
"""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Attention, Description, FeedForward, Norm, Sizes, Stack, Sublayer, set_width
from oneshot.errors import CheckpointError

_ATTENTION = Attention(module="attn", q="attn.q", k="attn.k", v="attn.v", out="attn.c_proj")
STACK = Stack(
    (
        Sublayer(_ATTENTION, Norm("ln_1", "layer")),
        Sublayer(FeedForward(up="mlp.c_fc", down="mlp.c_proj", gate=None, activation="mlp.act"), Norm("ln_2", "layer")),
    ),
    layers="transformer.h",
    embedding="transformer.wte.weight",
    positions="transformer.wpe.weight",
    final_norm=Norm("transformer.ln_f", "layer"),
    rotary=False,
    fused={"attn.c_attn": (_ATTENTION.q, _ATTENTION.k, _ATTENTION.v)},
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
)
SIZES = Sizes(
    hidden_size="n_embd",
    intermediate_size="n_inner",
    num_attention_heads="n_head",
    num_key_value_heads=None,
    num_hidden_layers="n_layer",
    head_dim=None,
    norm_epsilon="layer_norm_epsilon",
    width_factor=4,
)


def check(config: dict[str, Any]) -> None:
    """Refuse cross-attention, and scores that are scaled by the layer's number."""
    if config.get("add_cross_attention") or config.get("scale_attn_by_inverse_layer_idx"):
        raise CheckpointError(
            f"This {config['model_type']} has cross-attention or scores scaled by layer, which is not supported; give "
            "a plain decoder."
        )


def check_big_code(config: dict[str, Any]) -> None:
    """Refuse GPTBigCode with several KV heads, whose linear is fused head by head."""
    check(config)
    if not config.get("multi_query", True):
        raise CheckpointError("This gpt_bigcode has several KV heads, which is not supported; give one with one.")


GPT2 = Description("gpt2", STACK, set_width, check, sizes=SIZES, unused=(".attn.bias", ".attn.masked_bias"))
GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    stack=replace(STACK.with_attention(replace(_ATTENTION, one_group=True)), transposed=()),
    check=check_big_code,
)
