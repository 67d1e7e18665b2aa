"""Qwen3: the Llama layer, with an RMSNorm over each head's query and key, shared by all heads."""

from oneshot.arch.base import Architecture, set_sizes

QWEN3 = Architecture(model_type="qwen3", resize_config=set_sizes)
