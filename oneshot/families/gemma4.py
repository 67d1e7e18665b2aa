"""Gemma 4 for text: attention whose heads differ by layer, which is carried, a norm inside the FFN's branch, and a
number that multiplies the stream after every layer.

Only dense models: the small ones also read an embedding of the token in every layer, and share keys between layers.
"""

from dataclasses import replace
from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families.carried import Carried, carried_layers
from oneshot.families.description import Description
from oneshot.families.gemma import scaled_embedding
from oneshot.families.resizing import set_ffn_width
from oneshot.families.stack import Stack
from oneshot.families.sublayers import FeedForward, Norm, Sublayer

WINDOWS = Carried("attention within windows", "self_attn.o_proj", attends=True)
ATTENTION = Carried("attention", "self_attn.o_proj", attends=True)
REFUSED = {
    "hidden_size_per_layer_input": "an embedding of the token in every layer",
    "num_kv_shared_layers": "layers that share keys and values",
    "enable_moe_block": "experts beside its FFN",
}


def check(config: dict[str, Any]) -> None:
    """Refuse models that are not dense, or that see later tokens."""
    for name, what in REFUSED.items():
        if config.get(name):
            raise CheckpointError(
                f"This Gemma 4 has {what} ({name}), which is not supported; give a dense one, such as the 31B."
            )
    if config.get("use_bidirectional_attention") == "all":
        raise CheckpointError("This Gemma 4 attends in both directions, which is not supported; give one that writes.")


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factor of its embedding, the bound of its logits, and the types of its layers."""
    known = replace(scaled_embedding(family, config), head_cap=config.get("final_logit_softcapping"))
    return replace(known, carried_layers=carried_layers(config, family.mixers))


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
