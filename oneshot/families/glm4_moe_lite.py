"""GLM-4.7-Flash: GLM-4-MoE's experts with DeepSeek's attention; the config names the layers that have experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oneshot.architecture.description import Description
from oneshot.families.deepseek import DEEPSEEK_V3
from oneshot.families.deepseek import variant as deepseek_variant
from oneshot.families.mixtures import number_of_layers

SPARSE, DENSE = "sparse", "dense"


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the queries and gates that a config states, and its dense layers: by default the first."""
    stated = config.get("mlp_layer_types")
    types = stated if isinstance(stated, list) else [DENSE]
    dense = (number for number, one in enumerate(types[: number_of_layers(config)]) if one != SPARSE)
    return replace(deepseek_variant(family, config), dense_layers=tuple(dense))


def named_layers(flags: Sequence[bool]) -> dict[str, Any]:
    """Return what a config states of layers that are dense where the flags say so."""
    return {"mlp_layer_types": [DENSE if is_dense else SPARSE for is_dense in flags]}


GLM4_MOE_LITE = replace(DEEPSEEK_V3, model_type="glm4_moe_lite", variant=variant, with_dense=named_layers)
