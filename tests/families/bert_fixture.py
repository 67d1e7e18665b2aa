"""BERT as a family file: norms after the sums, biases everywhere, an FFN without a gate, and no output head."""

from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families import Attention, Description, FeedForward, ModelShape, Norm, Sizes, Stack, Sublayer

STACK = Stack(
    (
        Sublayer(
            Attention(
                module="attention.self",
                q="attention.self.query",
                k="attention.self.key",
                v="attention.self.value",
                out="attention.output.dense",
            ),
            Norm("attention.output.LayerNorm", "layer", "after"),
            "attention_shortcut",
        ),
        Sublayer(
            FeedForward(
                up="intermediate.dense",
                down="output.dense",
                gate=None,
                activation="intermediate.intermediate_act_fn",
            ),
            Norm("output.LayerNorm", "layer", "after"),
            "ffn_shortcut",
        ),
    ),
    layers="encoder.layer",
    embedding="embeddings.word_embeddings.weight",
    positions="embeddings.position_embeddings.weight",
    final_norm=None,
    rotary=False,
)
SIZES = Sizes(num_key_value_heads=None, head_dim=None, norm_epsilon="layer_norm_eps")


def check(config: dict[str, Any]) -> None:
    """Refuse decoders."""
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise CheckpointError("This BERT is a decoder, which is not supported.")


def resize(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the resized config; BERT's config can only state another FFN width."""
    return config | {"intermediate_size": shape.intermediate_size}


BERT = Description(
    "bert",
    STACK,
    resize,
    check,
    head=None,
    auto_class="AutoModel",
    sizes=SIZES,
    unsupported={"heads": "BERT's own layer has heads as wide as its hidden size; use --set heads=none."},
)
