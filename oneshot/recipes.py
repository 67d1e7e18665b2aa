"""Named recipes: which parts of a model are reduced and how. A recipe is data; every part can be overridden."""

from dataclasses import dataclass

from oneshot.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """Selectors for FFN neurons and attention heads, and the correction folded into the consuming linears.

    Attributes:
        ffn: `id` (output-weighted pivots), `activation-norm`, `magnitude`, `random` or `none`.
        heads: `id` (two-step interpolative decomposition, STAT section 3.2) or `none`.
        correction: `none`, `same-layer` or `two-stream` least squares.
    """

    ffn: str
    heads: str
    correction: str

    @property
    def reads_activations(self) -> bool:
        """Whether a forward pass over calibration text is needed at all."""
        weights_only = self.ffn in ("magnitude", "random", "none") and self.heads == "none"
        return not (weights_only and self.correction == "none")


RECIPES = {
    "oneshot": Recipe(ffn="id", heads="none", correction="same-layer"),
    "stat": Recipe(ffn="id", heads="id", correction="two-stream"),
    "activation-norm": Recipe(ffn="activation-norm", heads="none", correction="none"),
    "magnitude": Recipe(ffn="magnitude", heads="none", correction="none"),
    "random": Recipe(ffn="random", heads="none", correction="none"),
}


def resolve_recipe(name: str, *, ffn: str | None, heads: str | None, correction: str | None) -> Recipe:
    """The named recipe with the given parts replaced. Raises `ConfigError` for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(f"--recipe {name} is not known: choose one of {', '.join(RECIPES)}.")
    recipe = RECIPES[name]
    return Recipe(
        ffn=ffn if ffn is not None else recipe.ffn,
        heads=heads if heads is not None else recipe.heads,
        correction=correction if correction is not None else recipe.correction,
    )
