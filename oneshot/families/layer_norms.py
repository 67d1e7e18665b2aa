"""Decoders with LayerNorms that need a few lines, in one table."""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Attention, Description, FeedForward, Norm, Sizes, Stack, Sublayer, set_width
from oneshot.errors import CheckpointError
from oneshot.families.llama import STACK


def parallel(attention: Attention, ffn: FeedForward, norm: Norm, final: Norm) -> Stack:
    """Return a stack whose sublayers read one norm, and add to the stream together."""
    sublayers = Sublayer(attention, norm), Sublayer(ffn, norm)
    return Stack(sublayers, final_norm=final, parallel=True)


def check_cohere(config: dict[str, Any]) -> None:
    """Refuse norms of queries and keys with weights for every head."""
    if config.get("use_qk_norm"):
        raise CheckpointError("This Cohere norms queries and keys, which is not supported; give one that does not.")


def check_phi(config: dict[str, Any]) -> None:
    """Refuse norms of queries and keys."""
    if config.get("qk_layernorm"):
        raise CheckpointError("This Phi norms queries and keys, which is not supported; give one that does not.")


def check_stablelm(config: dict[str, Any]) -> None:
    """Refuse sublayers beside each other, and norms of every head with weights of its own."""
    if config.get("use_parallel_residual") or config.get("qk_layernorm"):
        raise CheckpointError(
            "This StableLM has attention beside the FFN or norms of queries and keys, which is not supported; give "
            "one without them."
        )


def scaled_logits(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factor of the logits."""
    return replace(family, head_scale=float(config.get("logit_scale", 1.0)))


# Command R and R7B: Llama's linears in parallel sublayers, which read one LayerNorm without a bias
COHERE = Description(
    "cohere",
    parallel(
        Attention(),
        FeedForward(),
        Norm("input_layernorm", "layer", has_bias=False),
        Norm("model.norm", "layer", has_bias=False),
    ),
    check=check_cohere,
    variant=scaled_logits,
    sizes=Sizes(norm_epsilon="layer_norm_eps"),
)
COHERE2 = replace(COHERE, model_type="cohere2")
# Phi-1, Phi-1.5 and Phi-2: parallel sublayers that read one LayerNorm, biases everywhere, also of the output head
PHI = Description(
    "phi",
    parallel(
        Attention(out="self_attn.dense"),
        FeedForward(up="mlp.fc1", down="mlp.fc2", gate=None, activation="mlp.activation_fn"),
        Norm("input_layernorm", "layer"),
        Norm("model.final_layernorm", "layer"),
    ),
    check=check_phi,
    sizes=Sizes(norm_epsilon="layer_norm_eps"),
)
# Nemotron and Minitron: LayerNorms that multiply by one plus their weights, an FFN without a gate
NEMOTRON = Description(
    "nemotron",
    Stack(
        (
            Sublayer(Attention(), Norm("input_layernorm", "layer", 1.0)),
            Sublayer(FeedForward(gate=None), Norm("post_attention_layernorm", "layer", 1.0)),
        ),
        final_norm=Norm("model.norm", "layer", 1.0),
    ),
    sizes=Sizes(norm_epsilon="norm_eps"),
)
# the Llama layer with LayerNorms
_STACK = replace(
    STACK,
    sublayers=tuple(replace(each, before=Norm(each.norm.name, "layer")) for each in STACK.sublayers),
    final_norm=Norm("model.norm", "layer"),
)
# heads are as wide as the hidden size
STABLELM = Description(
    "stablelm", _STACK, set_width, check_stablelm, sizes=Sizes(head_dim=None, norm_epsilon="layer_norm_eps")
)
# biases, and an FFN without a gate
STARCODER2 = Description(
    "starcoder2",
    _STACK.with_ffn(FeedForward(up="mlp.c_fc", down="mlp.c_proj", gate=None, activation="mlp.act")),
    sizes=Sizes(norm_epsilon="norm_epsilon"),
)
