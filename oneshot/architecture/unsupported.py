"""Features that some families cannot have because of what their layers are, each with a sentence and the remedy."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from oneshot.architecture.carried import Carried
from oneshot.architecture.resizing import FIXED_HEADS_ALONE, NO_FFN_BIASES, NO_HIDDEN_SIZE, ONLY_STOCK

if TYPE_CHECKING:
    from oneshot.architecture.description import Description

Feature = Literal[
    "heads",
    "hidden size",
    "ffn biases",
    "up_proj",
    "queries and keys",
    "embedding ranks",
    "self text",
    "profile",
    "depth",
    "latency",
    "experts",
    "sketch",
    "moments",
    "neuron scores",
    "held-out damping",
    "per-layer form",
]

# features of which only families with Llama's layers are known to have them
UNLIKE_LLAMA: Mapping[Feature, str] = {"ffn biases": NO_FFN_BIASES, "hidden size": NO_HIDDEN_SIZE}
# features that only layers with one FFN have
OF_DENSE_LAYERS: Mapping[Feature, str] = {
    "up_proj": "--up-steps is not supported for the experts of {}; leave it out.",
    "latency": "--budget latency is not supported for the mixture of experts {}; choose another budget.",
    "sketch": "--set sketch= is not supported for the experts of {}; set sketch=none and pivoting=cholesky.",
    "moments": "--set ffn=flap and tcsp-score are not supported for the experts of {}; choose another selector.",
    "neuron scores": "--set allocation=flap, stat and stat-reversed are not supported for the experts of {}; choose "
    "another.",
    "held-out damping": "--set damping=auto is not supported for the experts of {}; give a number.",
}
# features that a norm between a mixer and the sum with the stream makes impossible
NORMS_INSIDE: Mapping[Feature, str] = {
    "up_proj": "--up-steps is not possible for {}, which norms what its FFN writes; leave it out."
}
# features that attention with a latent of keys and values cannot have
OF_HEADS: Mapping[Feature, str] = {
    "heads": "Heads of {} share the latent of their keys and values, so none can be removed; use --set heads=none.",
    "queries and keys": "--set query_key_size= is not possible in {}, whose keys come from a latent; leave it out.",
}
# features that attention which stays as it is cannot have
CARRIED: Mapping[Feature, str] = {
    "heads": "The attention of {} stays as it is, so no head can be removed; use --set heads=none.",
    "queries and keys": "The attention of {} stays as it is, so --set query_key_size= is not possible; leave it out.",
}
# features that may take another layer for the first one
FIRST_DIFFERS: Mapping[Feature, str] = {
    "latency": "--budget latency is not supported for {}, whose first layer is of its own kind; choose another budget.",
    "profile": "A profile of {} is not supported, whose first layer is of its own kind; a run with allocation=uniform "
    "and depth=none needs none.",
}
# features that may make another layer the last one
LAST_DIFFERS: Mapping[Feature, str] = {
    "depth": "--set depth= is not supported for {}, whose last layer is of its own kind; leave it out."
}
# features that would pass layers which also read their tokens, or keys and values of earlier layers
TOKEN_INPUTS: Mapping[Feature, str] = {
    "latency": "--budget latency is not supported for this {}, whose layers also read their tokens and keys of other "
    "layers; choose another budget.",
    "embedding ranks": "--set embedding=low-rank is not possible for this {}, whose layers read the embedding of their "
    "tokens again; leave it out.",
}
# features that take sublayers one after the other
PARALLEL: Mapping[Feature, str] = {
    "up_proj": "--up-steps is not possible for {}, whose FFN is beside its attention; leave it out."
}


def reason_against(family: "Description", feature: Feature) -> str | None:
    """Return a sentence why a family's layers cannot have a feature; None if they can."""
    stack = family.stack
    if not family.like_llama and feature in UNLIKE_LLAMA:
        return UNLIKE_LLAMA[feature].format(family.model_type)
    if not family.like_llama and feature == "per-layer form" and not stack.causal:
        return ONLY_STOCK.format(family.model_type)
    if (reason := _reason_against_heads(family, feature)) is not None:
        return reason
    if family.first_differs and feature in FIRST_DIFFERS:
        return FIRST_DIFFERS[feature].format(family.model_type)
    if family.last_differs and feature in LAST_DIFFERS:
        return LAST_DIFFERS[feature].format(family.model_type)
    if stack.token_inputs is not None and feature in TOKEN_INPUTS:
        return TOKEN_INPUTS[feature].format(family.model_type)
    if stack.parallel and feature in PARALLEL:
        return PARALLEL[feature].format(family.model_type)
    if stack.norms_inside and feature in NORMS_INSIDE:
        return NORMS_INSIDE[feature].format(family.model_type)
    if feature == "experts" and stack.experts is None:
        return f"--set experts= is for mixtures of experts, which {family.model_type} is not; leave it out."
    if stack.experts is not None and feature in OF_DENSE_LAYERS:
        return OF_DENSE_LAYERS[feature].format(family.model_type)
    if feature == "up_proj" and stack.ffn.gate is None:
        return f"--up-steps needs FFNs with a gate, which {family.model_type} does not have; leave it out."
    if feature == "self text" and family.head is None:
        return f"--calibration self needs a model that writes text, which {family.model_type} does not; give a file."
    if feature == "embedding ranks" and stack.centres:
        return "--set embedding=low-rank needs an output head that is the embedding; leave it out."
    return None


def _reason_against_heads(family: "Description", feature: Feature) -> str | None:
    """Return a sentence why the family cannot have a feature of attention; None if it can."""
    mixer = family.stack.token_mixer
    if isinstance(mixer, Carried):
        return CARRIED[feature].format(family.model_type) if feature in CARRIED else None
    if feature == "heads" and family.sizes.head_dim is None:  # a class that makes it of the hidden size
        return FIXED_HEADS_ALONE.format(family.model_type)
    if feature in OF_HEADS and mixer.latent:
        return OF_HEADS[feature].format(family.model_type)
    if feature == "queries and keys" and mixer.q_norm is not None:
        return f"--set query_key_size= is not possible in {family.model_type}, which norms both; leave it out."
    if feature == "queries and keys" and mixer.one_group and not family.stack.rotary:
        return f"--set query_key_size= is not possible in {family.model_type}, whose heads share keys; leave it out."
    if feature == "heads" and mixer.sinks is not None:
        return f"Heads of {family.model_type} have sinks and stay; use --set heads=none."
    if feature == "heads" and mixer.norms_all_heads:
        return f"Heads of {family.model_type} are normed together, so none can be removed; use --set heads=none."
    return None
