"""ModernBERT: an encoder with rotary positions, windows in most layers, and an FFN with a gate.

Its attention is carried: one linear has queries, keys and values, and heads are as wide as the hidden size. The first
layer has no norm before its attention.
"""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Carried, Description, FeedForward, Norm, Sizes, Stack, Sublayer, set_width
from oneshot.errors import CheckpointError
from oneshot.families.mixtures import number_of_layers

ATTENTION = Carried("attention in one linear", "attn.Wo", attends=True)
FIRST = replace(ATTENTION, title="attention without a norm before it")
KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def check(config: dict[str, Any]) -> None:
    """Refuse rotary positions that depend on the length of a text."""
    stated = config.get("rope_parameters") or {}
    for one in (stated, *(stated.values() if isinstance(stated, dict) else ())):
        if isinstance(one, dict) and one.get("rope_type", "default") != "default":
            raise CheckpointError(
                f"This ModernBERT has rotary positions of the type {str(one['rope_type'])[:100]}, which is not "
                "supported; give one with the default type."
            )


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family whose norms have the biases that a config states."""
    has_bias, stack = bool(config.get("norm_bias")), family.stack

    def norm(known: Norm | None) -> Norm | None:
        return None if known is None else replace(known, has_bias=has_bias)

    sublayers = tuple(replace(each, before=norm(each.before)) for each in stack.sublayers)
    stack = replace(
        stack, sublayers=sublayers, embedding_norm=norm(stack.embedding_norm), final_norm=norm(stack.final_norm)
    )
    return replace(family, stack=stack, carried_layers={0: FIRST} if number_of_layers(config) else {})


MODERNBERT = Description(
    "modernbert",
    Stack(
        (
            Sublayer(ATTENTION),
            Sublayer(
                FeedForward("mlp.up_proj", "mlp.Wo", "mlp.gate_proj", activation="mlp.act"), Norm("mlp_norm", "layer")
            ),
        ),
        layers="layers",
        embedding="embeddings.tok_embeddings.weight",
        embedding_norm=Norm("embeddings.norm", "layer"),
        final_norm=Norm("final_norm", "layer"),
        causal=False,
        fused={"mlp.Wi": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    set_width,
    check,
    variant=variant,
    head=None,
    masked_head="decoder.weight",
    classes=tuple(f"ModernBert{kind}" for kind in KINDS),
    prefix="model",
    sizes=Sizes(num_key_value_heads=None, head_dim=None, norm_epsilon="norm_eps"),
    first_differs=True,
)
