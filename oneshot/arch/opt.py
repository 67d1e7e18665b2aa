"""OPT: LayerNorm, learned positions, biases everywhere, an FFN without a gate.

Its stock config ties head count and head size to the hidden size, so only the FFN shrinks within it; the hidden size
and what is inside the heads need the per-layer form, where LayerNorms are RMSNorms (`fold.to_rms_norms`).
"""

from typing import Any

from oneshot.arch.base import ATTENTION_NORM, DOWN_PROJ, FFN_NORM, O_PROJ, UP_PROJ, Architecture
from oneshot.errors import CheckpointError, PlanError
from oneshot.records import ModelShape


def check_config(config: dict[str, Any]) -> None:
    """OPT-350m norms after its blocks and embeds into another width; Galactica has no biases."""
    if not config.get("do_layer_norm_before", True) or config.get("_remove_final_layer_norm"):
        raise CheckpointError("This OPT norms after its blocks (as OPT-350m does), which is not supported.")
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise CheckpointError("This OPT projects its embeddings (as OPT-350m does), which is not supported.")
    if not config.get("enable_bias", True) or not config.get("layer_norm_elementwise_affine", True):
        raise CheckpointError("This OPT has no biases (as Galactica has none), which is not supported.")


def resize_config(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """OPT's config states its FFN width and nothing else that may shrink."""
    if shape.num_attention_heads != config["num_attention_heads"]:
        raise PlanError(
            "OPT's own layer has heads as wide as its hidden size, so none can be removed; use --heads none."
        )
    return config | {"ffn_dim": shape.intermediate_size}


OPT = Architecture(
    model_type="opt",
    resize_config=resize_config,
    check_config=check_config,
    embedding="model.decoder.embed_tokens.weight",
    positions="model.decoder.embed_positions.weight",
    position_offset=2,
    final_norm="model.decoder.final_layer_norm",
    layers="model.decoder.layers",
    own_names={
        O_PROJ: "self_attn.out_proj",
        UP_PROJ: "fc1",
        DOWN_PROJ: "fc2",
        ATTENTION_NORM: "self_attn_layer_norm",
        FFN_NORM: "final_layer_norm",
    },
    activation="activation_fn",
    width_key="ffn_dim",
    norm_bias=True,
    gated=False,
    removable_heads=False,
)
