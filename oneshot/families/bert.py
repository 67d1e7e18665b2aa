"""Encoders of BERT's layer: norms after the sums, biases everywhere, no rotation.

BERT and sentence encoders of its class (MiniLM, BGE, E5); DistilBERT, under other names, without token types and a
pooler; RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA, under BERT's names, in the stock form.

Stock configs tie head count and head size to the hidden size, so only the FFN shrinks within them. Heads, sizes inside
them and the hidden size need the per-layer form.
"""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Attention, Description, FeedForward, Norm, Sizes, Stack, Sublayer
from oneshot.architecture.resizing import FIXED_HEADS, set_width
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
DISTILBERT = Description(
    "distilbert",
    replace(
        STACK,
        sublayers=(
            Sublayer(
                Attention(
                    module="attention",
                    q="attention.q_lin",
                    k="attention.k_lin",
                    v="attention.v_lin",
                    out="attention.out_lin",
                    fixed_heads=True,
                ),
                after=Norm("sa_layer_norm", "layer"),
            ),
            Sublayer(
                FeedForward(up="ffn.lin1", down="ffn.lin2", gate=None, activation="ffn.activation"),
                after=Norm("output_layer_norm", "layer"),
            ),
        ),
        layers="transformer.layer",
        token_types=None,
    ),
    set_width,
    head=None,
    masked_head="vocab_projector.weight",
    classes=tuple(f"DistilBert{kind}" for kind in KINDS),
    prefix="distilbert",
    sizes=Sizes(
        hidden_size="dim",
        intermediate_size="hidden_dim",
        num_attention_heads="n_heads",
        num_key_value_heads=None,
        num_hidden_layers="n_layers",
        head_dim=None,
        norm_epsilon=None,  # 1e-12 in the code
    ),
    like_llama=True,
    unsupported={"heads": FIXED_HEADS.format("DistilBERT")},
)


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family whose first positions, up to the padding token's number, are not used."""
    padding = config.get("pad_token_id")
    offset = 2 if padding is None else int(padding) + 1
    return replace(family, stack=replace(family.stack, position_offset=offset))


def check_electra(config: dict[str, Any]) -> None:
    """Refuse embeddings of another width than the layers, as ELECTRA small has them."""
    check(config)
    if config.get("embedding_size") != config.get("hidden_size"):
        raise CheckpointError(
            "This ELECTRA projects its embeddings to the hidden size, which is not supported; give one of equal widths."
        )


def _roberta(model_type: str, name: str) -> Description:
    return Description(
        model_type,
        STACK,
        set_width,
        check,
        head=None,
        masked_head="lm_head.decoder.weight",
        classes=tuple(f"{name}{kind}" for kind in KINDS),
        prefix="roberta",
        sizes=SIZES,
        variant=variant,
    )


ROBERTA = _roberta("roberta", "Roberta")
XLM_ROBERTA = _roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = _roberta("camembert", "Camembert")
ELECTRA = replace(
    ROBERTA,
    model_type="electra",
    check=check_electra,
    masked_head="generator_lm_head.weight",
    classes=(*(f"Electra{kind}" for kind in KINDS), "ElectraForPreTraining"),
    prefix="electra",
    variant=lambda family, config: family,
)
