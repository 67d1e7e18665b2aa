"""Recipes: methods with a name. Every field of one can be replaced."""

from dataclasses import replace
from typing import Any

from oneshot.errors import ConfigError
from oneshot.method import Method
from oneshot.parsing import did_you_mean

ROUNDING_DAMPING = 1e-6  # a ridge against rounding only, for papers that have none

RECIPES = {
    "oneshot": Method(
        ffn="id",
        heads="none",
        correction="two-stream",
        embedding="auto",
        ranks="auto",
        curvature="auto",
        expert_counts="auto",
    ),
    "stat": Method(
        ffn="id",
        heads="id",
        correction="two-stream",
        residual_target="sublayer",
        residual_weight=1.0,
        damping=ROUNDING_DAMPING,
        expert_damping=ROUNDING_DAMPING,
        pivoting="grouped",
        sketch="count",
        layer_allocation="stat",
    ),
    "tcsp": Method(ffn="none", heads="none", correction="none", hidden="pca"),
    "group-pca": Method(ffn="none", heads="none", correction="none", hidden="pca", group_size=8),
    "flap": Method(ffn="flap", heads="none", correction="bias", layer_allocation="flap"),
    "activation-norm": Method(ffn="activation-norm", heads="none", correction="none"),
    "magnitude": Method(ffn="magnitude", heads="none", correction="none"),
    "random": Method(ffn="random", heads="none", correction="none"),
}
"""The named methods: `--recipe oneshot` is `RECIPES["oneshot"]`."""

RECIPE_FORMS = {"group-pca": "per-layer"}  # recipes whose result no stock config can state


def find_recipe(name: str, **changes: Any) -> Method:
    """Return the method of a recipe with the fields in `changes` replaced.

    Raises `ConfigError` for an unknown name and for fields that contradict each other.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"--recipe {name} is not known: choose one of {', '.join(RECIPES)}{did_you_mean(name, RECIPES)}"
        )
    return replace(RECIPES[name], **changes)
