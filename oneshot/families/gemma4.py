"""Gemma 4 for text: attention whose heads differ by layer, which is carried, a norm inside the FFN's branch, and a
number that multiplies the stream after every layer.

The mixture has experts beside the FFN, which stays as it is. The small models, which read an embedding of the token in
every layer and share keys between layers, are not supported.
"""

from dataclasses import replace
from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families.branches import Branches
from oneshot.families.carried import Carried, carried_layers
from oneshot.families.description import Description, Sizes
from oneshot.families.experts import Experts
from oneshot.families.gemma import scaled_embedding
from oneshot.families.resizing import set_ffn_width
from oneshot.families.shapes import ModelShape
from oneshot.families.stack import Stack
from oneshot.families.sublayers import FeedForward, Norm, Sublayer

WINDOWS = Carried("attention within windows", "self_attn.o_proj", attends=True)
ATTENTION = Carried("attention", "self_attn.o_proj", attends=True)
REFUSED = {
    "hidden_size_per_layer_input": "an embedding of the token in every layer",
    "num_kv_shared_layers": "layers that share keys and values",
}
EXPERTS = Experts(
    module="experts",
    router="router.proj",
    experts="experts",
    shared_expert="mlp",
    expert_scale="router.per_expert_scale",
    branches=Branches(
        "router",
        "router.scale",
        experts_before="pre_feedforward_layernorm_2",
        after="post_feedforward_layernorm_2",
        shared_after="post_feedforward_layernorm_1",
    ),
    stored_linears=None,
)
SIZES = Sizes(
    intermediate_size="moe_intermediate_size",
    num_experts=("num_experts",),
    experts_per_token="top_k_experts",
    shared_expert_width="intermediate_size",
)


def check(config: dict[str, Any]) -> None:
    """Refuse models that read tokens in every layer, or that see later tokens."""
    for name, what in REFUSED.items():
        if config.get(name):
            raise CheckpointError(
                f"This Gemma 4 has {what} ({name}), which is not supported; give a larger one, such as the 31B."
            )
    if config.get("use_bidirectional_attention") == "all":
        raise CheckpointError("This Gemma 4 attends in both directions, which is not supported; give one that writes.")


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with its factor of the embedding, bound of logits, types of layers, and experts."""
    known = replace(scaled_embedding(family, config), head_cap=config.get("final_logit_softcapping"))
    known = replace(known, carried_layers=carried_layers(config, family.mixers))
    if not config.get("enable_moe_block"):
        return known
    return replace(known, stack=known.stack.with_experts(EXPERTS), resize=resized, sizes=SIZES)


def resized(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the stock config of the resized mixture."""
    assert shape.experts is not None
    return config | {"moe_intermediate_size": shape.intermediate_size, "num_experts": shape.experts.count}


GEMMA4 = Description(
    "gemma4_text",
    Stack(
        (
            Sublayer(ATTENTION, None, "attention_shortcut"),
            Sublayer(
                FeedForward(),
                Norm("pre_feedforward_layernorm"),
                "ffn_shortcut",
                inside=Norm("post_feedforward_layernorm"),
            ),
        ),
        layer_scale="layer_scalar",
    ),
    set_ffn_width("intermediate_size"),
    check,
    variant=variant,
    mixers={"sliding_attention": WINDOWS, "full_attention": None},
    last_differs=True,
)
