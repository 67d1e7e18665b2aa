"""T5 and models of its type: T5 1.0 and 1.1, Flan-T5, mT5. An encoder, and a decoder with cross-attention.

Norms are RMSNorms without biases. Scores have no scale, but a table of relative positions is added to them. The stock
config has one hidden size, one FFN width, one number of heads and one head size for both stacks.
"""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Attention, Description, FeedForward, Norm, Sizes, Stack, Sublayer, set_sizes
from oneshot.errors import CheckpointError

SELF = "layer.0.SelfAttention"
CROSS = "layer.1.EncDecAttention"


def _attention(module: str, *, memory: bool = False) -> Attention:
    return Attention(
        module=module,
        q=f"{module}.q",
        k=f"{module}.k",
        v=f"{module}.v",
        out=f"{module}.o",
        memory=memory,
        relative_bias=None if memory else f"{module}.relative_attention_bias.weight",
    )


def _stack(name: str, *, causal: bool) -> Stack:
    sublayers = [Sublayer(_attention(SELF), Norm("layer.0.layer_norm"))]
    if causal:
        cross = _attention(CROSS, memory=True)
        sublayers.append(Sublayer(cross, Norm("layer.1.layer_norm")))
    last = f"layer.{len(sublayers)}"
    ffn = FeedForward(
        up=f"{last}.DenseReluDense.wi_1",
        down=f"{last}.DenseReluDense.wo",
        gate=f"{last}.DenseReluDense.wi_0",
        activation=f"{last}.DenseReluDense.act",
    )
    sublayers.append(Sublayer(ffn, Norm(f"{last}.layer_norm")))
    return Stack(
        tuple(sublayers),
        layers=f"{name}.block",
        embedding="shared.weight",
        final_norm=Norm(f"{name}.final_layer_norm"),
        rotary=False,
        causal=causal,
    )


def check(config: dict[str, Any]) -> None:
    """Refuse an encoder or a decoder alone."""
    if config.get("is_encoder_decoder") is False or config.get("is_decoder"):
        raise CheckpointError("This T5 is not an encoder with a decoder, which is not supported; give a whole model.")


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the FFNs of a config: with a gate (1.1, Flan, mT5) or without (1.0)."""
    default = "relu" if family.model_type == "t5" else "gated-gelu"
    if str(config.get("feed_forward_proj", default)).startswith("gated-"):
        return family
    assert family.decoder is not None
    return replace(family, stack=_without_gate(family.stack), decoder=_without_gate(family.decoder))


def _without_gate(stack: Stack) -> Stack:
    ffn = replace(stack.ffn, gate=None, up=stack.ffn.up.replace("wi_1", "wi"))
    return stack.with_ffn(ffn)


T5 = Description(
    "t5",
    _stack("encoder", causal=False),
    set_sizes,
    check,
    classes=("T5ForConditionalGeneration",),
    sizes=Sizes(
        hidden_size="d_model",
        intermediate_size="d_ff",
        num_attention_heads="num_heads",
        num_key_value_heads=None,
        num_hidden_layers="num_layers",
        num_decoder_layers="num_decoder_layers",
        num_buckets="relative_attention_num_buckets",
        head_dim="d_kv",
        norm_epsilon="layer_norm_epsilon",
    ),
    like_llama=True,  # but for the forms with layers of different sizes, see below
    unsupported={
        "ffn biases": "--set correction=bias needs biases in the FFN, which T5 lacks; choose another correction.",
        "embedding ranks": "--set embedding=low-rank is not supported for T5; leave it out.",
        "self text": "--calibration self needs a model that continues text, which T5 does not; give a file.",
        "profile": "A profile of T5 is not supported; a run with allocation=uniform and depth=none needs none.",
        "latency": "--budget latency is not supported for T5; use flops.",
        "per-layer form": "T5's layers have equal sizes in every form; use --form stock.",
    },
    decoder=_stack("decoder", causal=True),
    variant=variant,
    free_head_size=True,
    own_head={"tie_word_embeddings": False, "scale_decoder_outputs": False},
    unused=(f"{CROSS}.relative_attention_bias.weight",),
)
MT5 = replace(T5, model_type="mt5", classes=("MT5ForConditionalGeneration",))
