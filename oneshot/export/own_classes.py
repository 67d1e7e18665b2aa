"""The classes of this package that open results of forms with a modelling file; no file of a checkpoint is run."""

from collections.abc import Callable
from typing import Any

from torch import nn

from oneshot.families import COMPRESSED_MODEL_TYPE, ENCODER_MODEL_TYPE, NAS_MODEL_TYPE, RESIZED_MODEL_TYPE

Classes = tuple[Any, Any]  # of the config and of the model


def _per_layer(_: dict[str, Any]) -> Classes:
    from oneshot.export.modeling_oneshot import OneshotConfig, OneshotForCausalLM

    return OneshotConfig, OneshotForCausalLM


def _encoder(config: dict[str, Any]) -> Classes:
    import oneshot.export.modeling_oneshot_encoder as encoder

    return encoder.OneshotEncoderConfig, getattr(encoder, config["architectures"][0])


def _nemotron_nas(_: dict[str, Any]) -> Classes:
    from oneshot.export.modeling_nemotron_nas import DeciLMConfig, DeciLMForCausalLM

    return DeciLMConfig, DeciLMForCausalLM


def _resized(config: dict[str, Any]) -> Classes:
    import oneshot.export.modeling_oneshot_resized as resized

    model_class = getattr(resized, config["architectures"][0])
    return model_class.config_class, model_class


def coordinates(width: int, rank: int) -> nn.Module:
    """Return what a linear of low rank reads through in the per-layer form, with no values yet."""
    from oneshot.export.modeling_oneshot import OneshotCoordinates

    return OneshotCoordinates(width, rank)


OWN_CLASSES: dict[str, Callable[[dict[str, Any]], Classes]] = {
    COMPRESSED_MODEL_TYPE: _per_layer,
    ENCODER_MODEL_TYPE: _encoder,
    NAS_MODEL_TYPE: _nemotron_nas,
    RESIZED_MODEL_TYPE: _resized,
}
"""The classes of a config.json, by its model type; imported when they are needed, because they load transformers."""
