"""The config of a per-layer result, so that vLLM need not run the modelling file of its folder."""

import copy

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig


@strict
class OneshotConfig(LlamaConfig):
    """The fields of the class of the same name in a result's modelling file, which explains them."""

    model_type = "oneshot"

    layers: list[dict] | None = None
    norm_width: int = 4096
    head_map: bool = False
    head_bias: bool = False
    num_positions: int = 0
    embedding: list[dict] | None = None
    own_head: bool = False
    output_head: list[dict] | None = None
    centred_embedding: bool = False
    residual_dropout: float | int = 0.0

    def validate_architecture(self) -> None:
        """Heads need not divide the hidden size here."""

    def validate_rope(self) -> None:
        """Rotary positions are the same in all layers, also where some types read a number of heads."""
        equal = copy.copy(self)
        if getattr(equal, "per_layer_config", None) is not None:  # transformers 5.14 and later
            equal.per_layer_config = None
        LlamaConfig.validate_rope(equal)


def reads_ranges(config: OneshotConfig) -> bool:
    """Return whether the output head is the embedding's ranges of the vocabulary."""
    return config.embedding is not None and not config.own_head
