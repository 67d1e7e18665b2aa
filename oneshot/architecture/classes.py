"""Classes of a decoder's family beside the one that predicts the next token: without a head, or with another one.

Embedding models and classifiers (reward models) have the same layers. What they have beside these is kept as it is.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from oneshot.architecture.description import Description, Feature, stated_class

PREDICTS = ("ForCausalLM", "LMHeadModel")  # ends of names of classes that predict the next token
UNSUPPORTED: dict[Feature, str] = {
    "per-layer form": "The forms with layers of different sizes hold decoders that predict tokens; use --form stock.",
    "hidden size": "--set hidden= is only for decoders that predict tokens; use none.",
    "ffn biases": "--set correction=bias is only for decoders that predict tokens; choose another correction.",
}


def predicts_tokens(config: dict[str, Any]) -> bool:
    """Return whether a decoder's config.json states a class that predicts the next token, or none."""
    stated = stated_class(config)
    return stated is None or stated.endswith(PREDICTS)


def as_stored(family: Description, config: dict[str, Any], names: Collection[str]) -> Description:
    """Return the family as the class of a config.json names its parts, which has these tensors."""
    if family.classes or family.decoder is not None:
        return family.stored_as(names)
    if predicts_tokens(config):
        return family
    base = family.stack.embedding.partition(".")[0] + "."  # of a class with a head, such as `model.`
    stack = family.stack if family.stack.embedding in names else family.stack.moved(base, "")
    return replace(
        family,
        stack=stack,
        head=None,
        classes=(str(stated_class(config)),),
        like_llama=True,
        unsupported={**family.unsupported, **UNSUPPORTED},
    )
