"""Qwen2 and Qwen2.5: the Llama layer, with biases on q, k and v."""

from oneshot.arch.base import Architecture, set_sizes

QWEN2 = Architecture(model_type="qwen2", resize_config=set_sizes)
