"""The supported family whose config is most like one that is not known."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from math import log
from typing import Any

from oneshot.families import FAMILIES

LEAST = 0.4  # likeness of a family that is worth naming


def nearest_family(config: Mapping[str, Any]) -> str | None:
    """Return the model type of the family whose stock config is most like a config.json by its fields.

    None if no family is like it.
    """
    likeness = likenesses(config)
    nearest = max(likeness, key=lambda name: likeness[name])
    return nearest if likeness[nearest] >= LEAST else None


def likenesses(config: Mapping[str, Any]) -> dict[str, float]:
    """Return every family's weighted Jaccard similarity of config fields, 0 to 1.

    A field that few families state weighs more (inverse document frequency). One that none states weighs little.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    everywhere = {field.name for field in fields(PreTrainedConfig)} | PreTrainedConfig().to_dict().keys()
    stated = {name: {field.name for field in fields(CONFIG_MAPPING[name])} - everywhere for name in FAMILIES}
    counts = Counter(field for names in stated.values() for field in names)
    weights = {field: log(1 + len(stated) / count) for field, count in counts.items()}
    own = {"rope_parameters" if field == "rope_theta" else field for field in config} - everywhere

    def weight(names: Iterable[str]) -> float:
        return sum(weights.get(name, log(2)) for name in sorted(names))

    return {name: weight(own & names) / weight(own | names) for name, names in stated.items()}
