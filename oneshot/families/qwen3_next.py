"""Qwen3-Next: gated linear attention in most layers and gated attention in the others, both carried, before experts.

Qwen3.5 has the same mixers before one FFN or experts.
"""

from oneshot.architecture.carried import Carried
from oneshot.architecture.description import Description
from oneshot.architecture.experts import Experts
from oneshot.architecture.further import APART, PREFIX
from oneshot.architecture.resizing import set_width
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import FeedForward, Norm, Sublayer
from oneshot.families.mixtures import QWEN2_MOE, named_layers, with_stated_layers

CHUNK = 64  # tokens that the scan of transformers takes together
GATED_ATTENTION = Carried("gated attention", "self_attn.o_proj", attends=True)
MIXERS: dict[str, Carried | None] = {
    "linear_attention": Carried(
        "gated linear attention",
        "linear_attn.out_proj",
        state=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        scan=(("linear_num_value_heads", CHUNK),),
    ),
    "full_attention": None,
}


def stack(ffn: FeedForward | Experts) -> Stack:
    """Return layers with gated attention, whose norms multiply by one plus their weights."""
    return Stack(
        (Sublayer(GATED_ATTENTION), Sublayer(ffn, Norm("post_attention_layernorm", offset=1.0))),
        final_norm=Norm("model.norm", offset=1.0),
    )


QWEN3_NEXT = Description(
    "qwen3_next",
    stack(Experts(shared_expert="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")),
    variant=with_stated_layers,
    with_dense=named_layers,
    sizes=QWEN2_MOE.sizes,
    unused_prefixes=(PREFIX,),
    further=APART,
    mixers=MIXERS,
)
QWEN3_5 = Description(
    "qwen3_5_text",
    stack(FeedForward()),
    set_width,
    unused_prefixes=(PREFIX,),
    further=APART,
    mixers=MIXERS,
)
QWEN3_5_MOE = Description(
    "qwen3_5_moe_text",
    QWEN3_NEXT.stack,
    sizes=QWEN3_NEXT.sizes,
    unused_prefixes=(PREFIX,),
    further=APART,
    mixers=MIXERS,
)
