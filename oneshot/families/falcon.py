"""Falcon 7B: parallel sublayers that read one LayerNorm, and one KV head in a linear with all queries."""

from typing import Any

from oneshot.architecture import Attention, Description, FeedForward, Norm, Sizes, Stack, Sublayer, set_width
from oneshot.errors import CheckpointError

_NORM = Norm("input_layernorm", "layer")
_ATTENTION = Attention(
    module="self_attention",
    q="self_attention.q",
    k="self_attention.k",
    v="self_attention.v",
    out="self_attention.dense",
    one_group=True,
)
STACK = Stack(
    (
        Sublayer(_ATTENTION, _NORM),
        Sublayer(FeedForward(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", gate=None, activation="mlp.act"), _NORM),
    ),
    layers="transformer.h",
    embedding="transformer.word_embeddings.weight",
    final_norm=Norm("transformer.ln_f", "layer"),
    fused={"self_attention.query_key_value": (_ATTENTION.q, _ATTENTION.k, _ATTENTION.v)},
    parallel=True,
)


def check(config: dict[str, Any]) -> None:
    """Refuse the layers of Falcon 1B and 40B."""
    is_7b = config.get("multi_query", True) and config.get("parallel_attn", True)
    if not is_7b or config.get("alibi") or config.get("new_decoder_architecture"):
        raise CheckpointError(
            "This Falcon has other layers than Falcon 7B (ALiBi, several KV heads, or sublayers one after the other), "
            "which is not supported; give one with the layers of the 7B model."
        )


FALCON = Description(
    "falcon",
    STACK,
    set_width,
    check,
    sizes=Sizes(
        intermediate_size="ffn_hidden_size",
        num_key_value_heads=None,
        head_dim=None,
        norm_epsilon="layer_norm_epsilon",
        width_factor=4,
    ),
)
