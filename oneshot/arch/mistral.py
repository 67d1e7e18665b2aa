"""Mistral: the Llama layer, without biases, with an optional sliding attention window."""

from oneshot.arch.base import Architecture, set_sizes

MISTRAL = Architecture(model_type="mistral", resize_config=set_sizes)
