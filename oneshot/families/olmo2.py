"""OLMo 2 and 3: norms inside the branches only, and norms over all heads of queries and of keys."""

from dataclasses import replace

from oneshot.families.description import Description
from oneshot.families.resizing import set_sizes
from oneshot.families.stack import Stack
from oneshot.families.sublayers import Attention, FeedForward, Norm, Sublayer

STACK = Stack(
    (
        Sublayer(
            Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", norms_all_heads=True),
            None,
            "attention_shortcut",
            inside=Norm("post_attention_layernorm"),
        ),
        Sublayer(FeedForward(), None, "ffn_shortcut", inside=Norm("post_feedforward_layernorm")),
    )
)

OLMO2 = Description("olmo2", STACK, set_sizes)
OLMO3 = replace(OLMO2, model_type="olmo3")
