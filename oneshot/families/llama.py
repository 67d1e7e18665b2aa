"""Llama and models of its type: SmolLM2, TinyLlama, Llama 2 and 3, Yi, …"""

from typing import Any

from oneshot.architecture.classes import predicts_tokens
from oneshot.architecture.description import Description, Sizes, stated_class
from oneshot.architecture.resizing import set_sizes
from oneshot.architecture.shapes import ModelShape
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import Attention, FeedForward, Norm, Sublayer

STACK = Stack(
    (Sublayer(Attention(), Norm("input_layernorm")), Sublayer(FeedForward(), Norm("post_attention_layernorm")))
)


def resize(keys: Sizes, config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the resized config; it may be a Mistral's.

    LlamaConfig refuses a hidden size that its head count does not divide. Mistral has the same layer and accepts it, so
    such a model without biases is written as Mistral's class of the same task, without a sliding window. No stock
    config holds one with biases, but layers of these sizes can be made (`stock_config`).
    """
    resized = set_sizes(keys, config, shape)
    if shape.mlp_bias:
        resized["mlp_bias"] = True
    has_biases = shape.attention_bias or shape.output_bias or shape.mlp_bias
    if has_biases or shape.hidden_size % shape.num_attention_heads == 0:
        return resized
    task = "ForCausalLM" if predicts_tokens(config) else str(stated_class(config)).removeprefix("Llama")
    return resized | {"model_type": "mistral", "architectures": [f"Mistral{task}"], "sliding_window": None}


LLAMA = Description("llama", STACK, resize, like_llama=True)
