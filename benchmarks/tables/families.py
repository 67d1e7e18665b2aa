"""The tables of supported families: forms by their descriptions, exactness by rows, engines by tests."""

import sys
from typing import get_args

from harness import ROOT

from oneshot.architecture import Description, Feature
from oneshot.checkpoint.gguf_stated import own_architecture
from oneshot.export.gguf import ARCHITECTURES
from oneshot.families import FAMILIES
from tables.cells import markdown

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "clients"))
from opened import opened

FORM = "per-layer form"
NAMES = {
    "heads": "fewer heads in the stock form",
    "hidden size": "a smaller hidden size",
    "ffn biases": "`correction=bias`",
    "up_proj": "`--up-steps`",
    "queries and keys": "smaller queries and keys",
    "self text": "`self` text",
    "profile": "a profile",
    "depth": "fewer layers",
    "latency": "a latency budget",
    "sketch": "a sketch",
    "moments": "`ffn=flap` and `tcsp-score`",
    "neuron scores": "`allocation=flap` and `stat`",
    "held-out damping": "`damping=auto`",
}
# Features of FFNs that no mixture has, in the words of one link.
OF_DENSE_FFNS = ("latency", "sketch", "moments", "neuron scores", "held-out damping")
OF_MIXTURES = "[what mixtures lack](guides/mixtures.md#what-is-not-supported)"


def families_table() -> str:
    """Return which forms and features every family has."""
    return markdown(
        ["`model_type`", "stock", "per-layer", "nemotron-nas", "gguf", "does not have", "carries"],
        [_line(name, family) for name, family in sorted(FAMILIES.items())],
        "All families have the stock form and fewer FFN neurons.",
    )


def opened_table() -> str:
    """Return which results other engines open in `tests/clients`."""
    lines = [[engine, form, ", ".join(f"`{name}`" for name in names)] for engine, form, names in opened()]
    return markdown(["opened by", "form", "`model_type` of the input"], lines, "From `tests/clients/opened.py`.")


def _line(name: str, family: Description) -> list[str]:
    refused = [feature for feature in get_args(Feature) if family.reason_against(feature) is not None]
    per_layer, stack = FORM not in refused, family.stack
    plain = (
        per_layer and family.like_llama and not stack.centres and stack.ffn.gate is not None and family.decoder is None
    )
    plain = plain and not family.carried
    own = own_architecture(name) is not None
    forms = (True, per_layer, plain and stack.attention.q_norm is None, own or (plain and name in ARCHITECTURES))
    is_mixture = set(OF_DENSE_FFNS) <= set(refused)
    lacks = [NAMES[one] for one in refused if one in NAMES and not (is_mixture and one in OF_DENSE_FFNS)]
    lacks += [OF_MIXTURES] if is_mixture else []
    return [f"`{name}`", *("yes" if form else "–" for form in forms), ", ".join(lacks) or "–", _carried(family)]


def _carried(family: Description) -> str:
    """Return the mixers that stay as they are."""
    mixers = list(dict.fromkeys(mixer.title for mixer in family.carried))  # some have two names in configs
    if family.stack.attentions and family.stack.attention.latent:
        mixers.append("latent attention")
    return ", ".join(mixers) or "–"
