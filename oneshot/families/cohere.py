"""Cohere (Command R) 1 and 2: Llama's linears in parallel sublayers, which read one LayerNorm without a bias."""

from dataclasses import replace
from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families.description import Description, Sizes
from oneshot.families.resizing import set_widths
from oneshot.families.stack import Stack
from oneshot.families.sublayers import Attention, FeedForward, Norm, Sublayer

_NORM = Norm("input_layernorm", "layer", has_bias=False)
STACK = Stack(
    (Sublayer(Attention(), _NORM, "attention_shortcut"), Sublayer(FeedForward(), _NORM, "ffn_shortcut")),
    final_norm=Norm("model.norm", "layer", has_bias=False),
    parallel=True,
)


def check(config: dict[str, Any]) -> None:
    """Refuse norms of queries and keys with weights for every head."""
    if config.get("use_qk_norm"):
        raise CheckpointError("This Cohere norms queries and keys, which is not supported; give one that does not.")


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factor of the logits."""
    return replace(family, head_scale=float(config.get("logit_scale", 1.0)))


COHERE = Description("cohere", STACK, set_widths, check, variant=variant, sizes=Sizes(norm_epsilon="layer_norm_eps"))
COHERE2 = replace(COHERE, model_type="cohere2")
