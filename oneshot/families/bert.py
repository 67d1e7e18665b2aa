"""BERT and sentence encoders of its class (MiniLM, BGE, E5): norms after the sums, biases everywhere, no rotation.

Its stock config ties head count and head size to the hidden size, so only the FFN shrinks within it. Heads, sizes
inside them and the hidden size need the per-layer form.
"""

from typing import Any

from oneshot.architecture.description import Description, Sizes
from oneshot.architecture.resizing import FIXED_HEADS, set_width
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import Attention, FeedForward, Norm, Sublayer
from oneshot.errors import CheckpointError

STACK = Stack(
    (
        Sublayer(
            Attention(
                module="attention.self",
                q="attention.self.query",
                k="attention.self.key",
                v="attention.self.value",
                out="attention.output.dense",
                fixed_heads=True,
            ),
            after=Norm("attention.output.LayerNorm", "layer"),
        ),
        Sublayer(
            FeedForward(
                up="intermediate.dense", down="output.dense", gate=None, activation="intermediate.intermediate_act_fn"
            ),
            after=Norm("output.LayerNorm", "layer"),
        ),
    ),
    layers="encoder.layer",
    embedding="embeddings.word_embeddings.weight",
    positions="embeddings.position_embeddings.weight",
    token_types="embeddings.token_type_embeddings.weight",
    embedding_norm=Norm("embeddings.LayerNorm", "layer"),
    final_norm=None,
    rotary=False,
    causal=False,
)
SIZES = Sizes(num_key_value_heads=None, head_dim=None, norm_epsilon="layer_norm_eps")
KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification")


def check(config: dict[str, Any]) -> None:
    """Refuse decoders, and positions that are not simply added."""
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise CheckpointError("This BERT is a decoder, which is not supported; give an encoder.")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise CheckpointError(
            f"This BERT has positions of the type {config['position_embedding_type']}, which is not supported; give "
            "one with absolute positions."
        )


BERT = Description(
    "bert",
    STACK,
    set_width,
    check,
    head=None,
    masked_head="cls.predictions.decoder.weight",
    classes=tuple(f"Bert{kind}" for kind in KINDS),
    prefix="bert",
    sizes=SIZES,
    like_llama=True,
    unsupported={"heads": FIXED_HEADS.format("BERT")},
)
