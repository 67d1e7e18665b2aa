"""The classes of this package that open results of forms with a modelling file; no file of a checkpoint is run."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from oneshot.families import COMPRESSED_MODEL_TYPE, ENCODER_MODEL_TYPE, NAS_MODEL_TYPE, RESIZED_MODEL_TYPE

Classes = tuple[Any, Any]  # of the config and of the model


def _classes(file: str, name: str | None, config: dict[str, Any]) -> Classes:
    """Return the classes of a modelling file; the one that the config states if no `name` is given."""
    model_class = getattr(import_module(f"oneshot.export.{file}"), name or config["architectures"][0])
    return model_class.config_class, model_class


def coordinates(width: int, rank: int) -> nn.Module:
    """Return what a linear of low rank reads through in the per-layer form, with no values yet."""
    from oneshot.export.modeling_oneshot import OneshotCoordinates

    return OneshotCoordinates(width, rank)


OWN_CLASSES: dict[str, Callable[[dict[str, Any]], Classes]] = {
    COMPRESSED_MODEL_TYPE: partial(_classes, "modeling_oneshot", "OneshotForCausalLM"),
    ENCODER_MODEL_TYPE: partial(_classes, "modeling_oneshot_encoder", None),
    NAS_MODEL_TYPE: partial(_classes, "modeling_nemotron_nas", "DeciLMForCausalLM"),
    RESIZED_MODEL_TYPE: partial(_classes, "modeling_oneshot_resized", None),
}
"""The classes of a config.json, by its model type; imported when they are needed, because they load transformers."""
