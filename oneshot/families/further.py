"""Layers that predict tokens after the next one, which transformers' classes do not have and results leave out."""

from collections.abc import Mapping
from typing import Any

WORDS = {"mtp", "nextn"}  # in the names of what a config states of such layers
PREFIX = "mtp."  # of such layers in files of Qwen; others have them behind the model's own layers


def without_further(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config states of a model without such layers: numbers of 0, and empty lists."""
    stated = {name: value for name, value in config.items() if WORDS & set(name.split("_"))}
    return {name: type(value)() for name, value in stated.items() if isinstance(value, int | list | dict)}
