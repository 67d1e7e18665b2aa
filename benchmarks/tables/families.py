"""The table of supported families, from their descriptions."""

from typing import get_args

from oneshot.export.gguf import ARCHITECTURES
from oneshot.families import FAMILIES, Description, Feature
from tables.cells import markdown

FORM = "per-layer form"
NAMES = {
    "heads": "fewer heads in the stock form",
    "hidden size": "a smaller hidden size",
    "ffn biases": "`correction=bias`",
    "up_proj": "`--up-steps`",
    "queries and keys": "smaller queries and keys",
    "self text": "`self` text",
    "profile": "a profile",
    "latency": "a latency budget",
    "sketch": "a sketch",
    "moments": "`ffn=flap` and `tcsp-score`",
    "held-out damping": "`damping=auto`",
}


def families_table() -> str:
    """Return which forms and features every family has."""
    return markdown(
        ["`model_type`", "stock", "per-layer", "nemotron-nas", "gguf", "does not have", "carries"],
        [_line(name, family) for name, family in sorted(FAMILIES.items())],
        "All families have the stock form and fewer FFN neurons.",
    )


def _line(name: str, family: Description) -> list[str]:
    refused = [feature for feature in get_args(Feature) if family.reason_against(feature) is not None]
    per_layer, stack = FORM not in refused, family.stack
    plain = (
        per_layer and family.like_llama and not stack.centres and stack.ffn.gate is not None and family.decoder is None
    )
    plain = plain and not family.carried
    forms = (True, per_layer, plain and stack.attention.q_norm is None, plain and name in ARCHITECTURES)
    lacks = [NAMES[feature] for feature in refused if feature in NAMES]
    return [f"`{name}`", *("yes" if form else "–" for form in forms), ", ".join(lacks) or "–", _carried(family)]


def _carried(family: Description) -> str:
    """Return the mixers that stay as they are."""
    mixers = [mixer.title for mixer in family.carried]
    if family.stack.attentions and family.stack.attention.latent:
        mixers.append("latent attention")
    return ", ".join(mixers) or "–"
