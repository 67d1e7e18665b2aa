"""OPT: LayerNorm, learned positions, biases everywhere, an FFN without a gate.

Its stock config ties head count and head size to the hidden size, so only the FFN shrinks within it. Fewer heads, the
hidden size and the sizes inside heads need the per-layer form, whose RMSNorms replace the LayerNorms
(`fold.to_rms_norms`).

OPT-350m norms after its sublayers, has no final norm, and projects a narrower embedding to its hidden size and back. It
has only the stock form.
"""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Attention, Description, Feature, FeedForward, Norm, Sizes, Stack, Sublayer
from oneshot.architecture.resizing import FIXED_HEADS, set_width
from oneshot.errors import CheckpointError

STACK = Stack(
    (
        Sublayer(Attention(out="self_attn.out_proj", fixed_heads=True), Norm("self_attn_layer_norm", "layer")),
        Sublayer(
            FeedForward(up="fc1", down="fc2", gate=None, activation="activation_fn"), Norm("final_layer_norm", "layer")
        ),
    ),
    layers="model.decoder.layers",
    embedding="model.decoder.embed_tokens.weight",
    positions="model.decoder.embed_positions.weight",
    position_offset=2,
    final_norm=Norm("model.decoder.final_layer_norm", "layer"),
    rotary=False,
)
SIZES = Sizes(
    intermediate_size="ffn_dim",
    num_key_value_heads=None,
    head_dim=None,
    norm_epsilon=None,
    table_width="word_embed_proj_dim",
)
ONLY_STOCK: dict[Feature, str] = {
    "heads": (
        "OPT-350m's own layer has heads as wide as its hidden size, and it has no other form, so none can be removed; "
        "use --set heads=none."
    ),
    "per-layer form": "The per-layer form holds no OPT with norms after its sublayers or with projections around its "
    "layers, as OPT-350m has; use --form stock.",
}


def check(config: dict[str, Any]) -> None:
    """Refuse variants without a final norm that others have, and Galactica, which has no biases."""
    if config.get("do_layer_norm_before", True) and config.get("_remove_final_layer_norm"):
        raise CheckpointError("This OPT lacks its final norm, which is not supported; give a model that has it.")
    if not config.get("enable_bias", True) or not config.get("layer_norm_elementwise_affine", True):
        raise CheckpointError("This OPT has no biases (as Galactica has none), which is not supported.")


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the places of norms and the projections of a config."""
    after = not config.get("do_layer_norm_before", True)
    projects = config.get("word_embed_proj_dim") not in (None, config.get("hidden_size"))
    stack = family.stack
    if after:
        sublayers = [replace(each, before=None, after=each.before) for each in stack.sublayers]
        stack = replace(stack, sublayers=tuple(sublayers), final_norm=None)
    if projects:
        stack = replace(stack, project_in="model.decoder.project_in", project_out="model.decoder.project_out")
    if after or projects:
        family = replace(family, unsupported={**family.unsupported, **ONLY_STOCK})
    return replace(family, stack=stack)


OPT = Description(
    "opt",
    STACK,
    set_width,
    check,
    sizes=SIZES,
    like_llama=True,
    unsupported={"heads": FIXED_HEADS.format("OPT")},
    variant=variant,
)
