"""OPT: LayerNorm, learned positions, biases everywhere, an FFN without a gate.

Its stock config ties head count and head size to the hidden size, so only the FFN shrinks within it. Fewer heads, the
hidden size and the sizes inside heads need the per-layer form, whose RMSNorms replace the LayerNorms
(`fold.to_rms_norms`).
"""

from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families.description import Attention, Description, FeedForward, Norm, Sizes, Stack, Sublayer
from oneshot.families.resizing import FIXED_HEADS, set_ffn_width

STACK = Stack(
    (
        Sublayer(
            Attention(out="self_attn.out_proj", fixed_heads=True),
            Norm("self_attn_layer_norm", "layer"),
            "attention_shortcut",
        ),
        Sublayer(
            FeedForward(up="fc1", down="fc2", gate=None, activation="activation_fn"),
            Norm("final_layer_norm", "layer"),
            "ffn_shortcut",
        ),
    ),
    layers="model.decoder.layers",
    embedding="model.decoder.embed_tokens.weight",
    positions="model.decoder.embed_positions.weight",
    position_offset=2,
    final_norm=Norm("model.decoder.final_layer_norm", "layer"),
    rotary=False,
)
SIZES = Sizes(intermediate_size="ffn_dim", num_key_value_heads=None, head_dim=None, norm_epsilon=None)


def check(config: dict[str, Any]) -> None:
    """Refuse OPT-350m, which norms after its sublayers, and Galactica, which has no biases."""
    if not config.get("do_layer_norm_before", True) or config.get("_remove_final_layer_norm"):
        raise CheckpointError("This OPT norms after its sublayers (as OPT-350m does), which is not supported.")
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise CheckpointError("This OPT projects its embeddings (as OPT-350m does), which is not supported.")
    if not config.get("enable_bias", True) or not config.get("layer_norm_elementwise_affine", True):
        raise CheckpointError("This OPT has no biases (as Galactica has none), which is not supported.")


OPT = Description(
    "opt",
    STACK,
    set_ffn_width("ffn_dim"),
    check,
    sizes=SIZES,
    unsupported={"heads": FIXED_HEADS.format("OPT")},
)
