"""Named recipes: which parts of a model are reduced and how. A recipe is data; every part can be overridden."""

from dataclasses import dataclass, replace

from oneshot.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """How FFN neurons, attention heads and the hidden size shrink, and the correction of the consuming linears.

    Attributes:
        ffn: `id` (output-weighted pivots), `activation-norm`, `magnitude`, `random` or `none`.
        heads: `id` (two-step interpolative decomposition, STAT section 3.2) or `none`.
        correction: `none`, `same-layer` or `two-stream` least squares.
        pivoting: of the `id` selector for neurons: `cholesky` (of the Gram), `qr` (of the sketch), `grouped` or
            `tournament` (of either).
        sketch: `none`, `count` or `sparse-sign`: what neuron pivots are chosen from instead of the exact Gram.
        hidden: `pca` (one projection of the residual stream for the whole model, TCSP section 4) or `none`.
    """

    ffn: str
    heads: str
    correction: str
    pivoting: str = "cholesky"
    sketch: str = "none"
    hidden: str = "none"

    @property
    def reads_activations(self) -> bool:
        """Whether a forward pass over calibration text is needed at all."""
        weights_only = self.ffn in ("magnitude", "random", "none") and self.heads == "none"
        return not (weights_only and self.correction == "none" and self.hidden == "none")


RECIPES = {
    "oneshot": Recipe(ffn="id", heads="none", correction="same-layer"),
    "stat": Recipe(ffn="id", heads="id", correction="two-stream", pivoting="grouped", sketch="count"),
    "tcsp": Recipe(ffn="none", heads="none", correction="none", hidden="pca"),
    "activation-norm": Recipe(ffn="activation-norm", heads="none", correction="none"),
    "magnitude": Recipe(ffn="magnitude", heads="none", correction="none"),
    "random": Recipe(ffn="random", heads="none", correction="none"),
}


def resolve_recipe(name: str, **parts: str | None) -> Recipe:
    """The named recipe with the parts that are not None replaced.

    Raises `ConfigError` for an unknown name, and for parts that do not go together.
    """
    if name not in RECIPES:
        raise ConfigError(f"--recipe {name} is not known: choose one of {', '.join(RECIPES)}.")
    recipe = replace(RECIPES[name], **{part: choice for part, choice in parts.items() if choice is not None})
    if recipe.pivoting == "qr" and recipe.sketch == "none":
        raise ConfigError("--pivoting qr needs a matrix to factorise; add --sketch count or --sketch sparse-sign.")
    return recipe
