"""Solar Open: GLM-4-MoE's experts in every layer, with Llama's attention."""

from dataclasses import replace
from typing import Any

from oneshot.families.description import Description
from oneshot.families.glm4_moe import GLM4_MOE, routed


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the gates that a config states; its class has no dense layers."""
    return routed(family, config | {"first_k_dense_replace": 0})


SOLAR_OPEN = replace(
    GLM4_MOE,
    model_type="solar_open",
    variant=variant,
    sizes=replace(GLM4_MOE.sizes, dense_width=None),
    with_dense=lambda flags: {},
)
