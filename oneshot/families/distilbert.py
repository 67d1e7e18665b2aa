"""DistilBERT: BERT's layer under other names, without token types and without a pooler."""

from oneshot.architecture.description import Description, Sizes
from oneshot.architecture.resizing import FIXED_HEADS, set_width
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import Attention, FeedForward, Norm, Sublayer
from oneshot.families.bert import KINDS

STACK = Stack(
    (
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
    embedding="embeddings.word_embeddings.weight",
    positions="embeddings.position_embeddings.weight",
    embedding_norm=Norm("embeddings.LayerNorm", "layer"),
    final_norm=None,
    rotary=False,
    causal=False,
)
SIZES = Sizes(
    hidden_size="dim",
    intermediate_size="hidden_dim",
    num_attention_heads="n_heads",
    num_key_value_heads=None,
    num_hidden_layers="n_layers",
    head_dim=None,
    norm_epsilon=None,  # 1e-12 in the code
)
DISTILBERT = Description(
    "distilbert",
    STACK,
    set_width,
    head=None,
    masked_head="vocab_projector.weight",
    classes=tuple(f"DistilBert{kind}" for kind in KINDS),
    prefix="distilbert",
    sizes=SIZES,
    like_llama=True,
    unsupported={"heads": FIXED_HEADS.format("DistilBERT")},
)
