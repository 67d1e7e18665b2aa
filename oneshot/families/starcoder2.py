"""StarCoder2: Llama's attention with LayerNorms and biases, an FFN without a gate."""

from oneshot.families.description import Description, Sizes
from oneshot.families.resizing import set_widths
from oneshot.families.stack import Stack
from oneshot.families.sublayers import Attention, FeedForward, Norm, Sublayer

STACK = Stack(
    (
        Sublayer(Attention(), Norm("input_layernorm", "layer"), "attention_shortcut"),
        Sublayer(
            FeedForward(up="mlp.c_fc", down="mlp.c_proj", gate=None, activation="mlp.act"),
            Norm("post_attention_layernorm", "layer"),
            "ffn_shortcut",
        ),
    ),
    final_norm=Norm("model.norm", "layer"),
)

STARCODER2 = Description(
    "starcoder2",
    STACK,
    set_widths,
    sizes=Sizes(norm_epsilon="norm_epsilon"),
)
