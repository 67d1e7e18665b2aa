"""Mistral: the Llama layer, without biases, with an optional sliding attention window."""

from typing import Any

from oneshot.arch.base import Architecture, set_sizes
from oneshot.records import ModelShape


def resize_config(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """MistralConfig holds any number of heads beside any hidden size."""
    return set_sizes(config, shape)


MISTRAL = Architecture(model_type="mistral", resize_config=resize_config)
