"""Llama, and what goes by its name: SmolLM2, TinyLlama, Llama 2 and 3, Yi, …"""

from typing import Any

from oneshot.arch.base import Architecture, set_sizes
from oneshot.errors import PlanError
from oneshot.records import ModelShape


def resize_config(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """LlamaConfig refuses a hidden size that its head count does not divide; Mistral, the same layer, accepts it.

    Such a model without biases is therefore written as `MistralForCausalLM` with no sliding window.
    """
    resized = set_sizes(config, shape)
    if shape.mlp_bias:
        resized["mlp_bias"] = True
    if shape.hidden_size % shape.num_attention_heads == 0:
        return resized
    if shape.attention_bias or shape.output_bias or shape.mlp_bias:
        raise PlanError(
            f"No stock config holds {shape.num_attention_heads} heads beside hidden size {shape.hidden_size} in a "
            "model with biases; keep a number of heads that divides the hidden size."
        )
    return resized | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}


LLAMA = Architecture(model_type="llama", resize_config=resize_config, optional_ffn_biases=True)
