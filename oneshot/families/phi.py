"""Phi-1, Phi-1.5 and Phi-2: parallel sublayers that read one LayerNorm, biases everywhere, also of the output head."""

from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families.description import Description, Sizes
from oneshot.families.resizing import set_widths
from oneshot.families.stack import Stack
from oneshot.families.sublayers import Attention, FeedForward, Norm, Sublayer

_NORM = Norm("input_layernorm", "layer")
STACK = Stack(
    (
        Sublayer(Attention(out="self_attn.dense"), _NORM, "attention_shortcut"),
        Sublayer(
            FeedForward(up="mlp.fc1", down="mlp.fc2", gate=None, activation="mlp.activation_fn"), _NORM, "ffn_shortcut"
        ),
    ),
    final_norm=Norm("model.final_layernorm", "layer"),
    parallel=True,
)


def check(config: dict[str, Any]) -> None:
    """Refuse norms of queries and keys."""
    if config.get("qk_layernorm"):
        raise CheckpointError("This Phi norms queries and keys, which is not supported; give one that does not.")


PHI = Description("phi", STACK, set_widths, check, sizes=Sizes(norm_epsilon="layer_norm_eps"))
