"""Gemma 3 for text: norms before the mixers and inside the branches, windows in most layers, a scaled embedding.

Gemma 2 has no norms of queries and keys; logits and scores are bounded by a hyperbolic tangent.
"""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Attention, Description, FeedForward, Norm, Stack, Sublayer, set_sizes
from oneshot.errors import CheckpointError
from oneshot.families.llamas import scaled_embedding

STACK = Stack(
    (
        Sublayer(
            Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
            Norm("input_layernorm", offset=1.0),
            inside=Norm("post_attention_layernorm", offset=1.0),
        ),
        Sublayer(
            FeedForward(),
            Norm("pre_feedforward_layernorm", offset=1.0),
            inside=Norm("post_feedforward_layernorm", offset=1.0),
        ),
    ),
    final_norm=Norm("model.norm", offset=1.0),
)


HEAD_CAP = 30.0  # transformers' default, of Gemma 2


def check(config: dict[str, Any]) -> None:
    """Refuse models whose tokens also see later ones, as those that make embeddings of texts."""
    if config.get("use_bidirectional_attention"):
        raise CheckpointError("This Gemma 3 attends in both directions, which is not supported; give one that writes.")


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factor of its embedding, and the bound that its logits may have."""
    return replace(scaled_embedding(family, config), head_cap=config.get("final_logit_softcapping"))


GEMMA3 = Description("gemma3_text", STACK, set_sizes, check, variant=variant)
GEMMA2 = Description(
    "gemma2",
    STACK.with_attention(Attention()),
    set_sizes,
    variant=lambda family, config: variant(family, {"final_logit_softcapping": HEAD_CAP} | config),
)
