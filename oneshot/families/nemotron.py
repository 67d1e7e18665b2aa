"""Nemotron and Minitron: LayerNorms that multiply by one plus their weights, an FFN without a gate."""

from oneshot.families.description import Description, Sizes
from oneshot.families.resizing import set_widths
from oneshot.families.stack import Stack
from oneshot.families.sublayers import Attention, FeedForward, Norm, Sublayer

STACK = Stack(
    (
        Sublayer(Attention(), Norm("input_layernorm", "layer", 1.0), "attention_shortcut"),
        Sublayer(FeedForward(gate=None), Norm("post_attention_layernorm", "layer", 1.0), "ffn_shortcut"),
    ),
    final_norm=Norm("model.norm", "layer", 1.0),
)

NEMOTRON = Description(
    "nemotron",
    STACK,
    set_widths,
    sizes=Sizes(norm_epsilon="norm_eps"),
)
