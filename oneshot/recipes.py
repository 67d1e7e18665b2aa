"""Named recipes: which parts of a model are reduced and how. A recipe is data; every part can be overridden."""

from dataclasses import dataclass, replace
from typing import Any

from oneshot.errors import ConfigError

WEIGHT_SELECTORS = ("magnitude", "random", "none")  # choose neurons without looking at activations
MOMENT_SELECTORS = ("flap", "tcsp-score")  # look at means and deviations


@dataclass(frozen=True)
class Recipe:
    """How FFN neurons, attention heads and the hidden size shrink, and the correction of the consuming linears.

    Attributes:
        ffn, heads: `id` (output-weighted pivots; for heads STAT section 3.2), `obs` (backward elimination), a score of
            `selection.column_scores`, or `none`.
        correction: `none`; `bias`: the mean of what is gone (FLAP); `same-layer` or `two-stream` least squares.
        pivoting: of the `id` selector for neurons: `cholesky` (of the Gram), `qr` (of the sketch), `grouped` or
            `tournament` (of either).
        sketch: `none`, `count` or `sparse-sign`: what neuron pivots are chosen from instead of the exact Gram.
        hidden: `pca` (projections of the residual stream: TCSP section 4, SP3 appendix F.1) or `none`.
        embedding: `low-rank` gives ranges of the vocabulary ranks of their own (`embedding`), where the tier is
            `per-layer`, the output head is the embedding, and sizes follow sensitivities; or `none`.
        up_steps: steps of conjugate gradients that correct `up_proj` behind `down_proj`'s least squares
            (`layerwise.up_proj`); 0 where that is not by least squares, or the hidden size shrinks.
        group_size: blocks that share a projection, 0 for one in the whole model.
        tier: `stock`, or `per-layer` for what no stock config holds.
        allocation: how sizes are shared out: `uniform`, or by a profile's `error`, `stat`, `block-influence`, `flap` or
            `sensitivity` (see `plan.profiled_damages`); `auto` is `sensitivity` where layers may differ, for the recipe
            `flap` its own.
        depth: `sensitivity` leaves out whole layers, too, where a profile says that this costs less; or `none`.
    """

    ffn: str
    heads: str
    correction: str
    pivoting: str = "cholesky"
    sketch: str = "none"
    hidden: str = "none"
    embedding: str = "none"
    up_steps: int = 0
    group_size: int = 0
    tier: str = "stock"
    allocation: str = "auto"
    depth: str = "none"

    @property
    def solves(self) -> bool:
        """Whether the correction is by least squares."""
        return self.correction in ("same-layer", "two-stream")

    @property
    def reads_profile(self) -> bool:
        """Whether sizes come from a profile."""
        blocks = self.allocation != "uniform" and (self.ffn != "none" or self.heads != "none")
        return blocks or self.depth != "none"


RECIPES = {
    "oneshot": Recipe(ffn="id", heads="none", correction="two-stream", embedding="low-rank"),
    "stat": Recipe(ffn="id", heads="id", correction="two-stream", pivoting="grouped", sketch="count"),
    "tcsp": Recipe(ffn="none", heads="none", correction="none", hidden="pca"),
    "group-pca": Recipe(ffn="none", heads="none", correction="none", hidden="pca", group_size=8, tier="per-layer"),
    "flap": Recipe(ffn="flap", heads="none", correction="bias"),
    "activation-norm": Recipe(ffn="activation-norm", heads="none", correction="none"),
    "magnitude": Recipe(ffn="magnitude", heads="none", correction="none"),
    "random": Recipe(ffn="random", heads="none", correction="none"),
}


def resolve_recipe(name: str, **parts: str | int | None) -> Recipe:
    """The named recipe with the parts that are not None replaced.

    Raises `ConfigError` for an unknown name, and for parts that do not go together.
    """
    if name not in RECIPES:
        raise ConfigError(f"--recipe {name} is not known: choose one of {', '.join(RECIPES)}.")
    chosen: dict[str, Any] = {part: choice for part, choice in parts.items() if choice is not None}
    recipe = replace(RECIPES[name], **chosen)
    if recipe.pivoting == "qr" and recipe.sketch == "none":
        raise ConfigError("--pivoting qr needs a matrix to factorise; add --sketch count or --sketch sparse-sign.")
    if recipe.depth != "none" and recipe.hidden != "none":
        raise ConfigError("--depth leaves out layers of a model whose hidden size stays; leave --hidden none.")
    if recipe.depth != "none" and recipe.allocation not in ("auto", "sensitivity"):
        raise ConfigError(f"--depth {recipe.depth} goes with --allocation sensitivity, not {recipe.allocation}.")
    if chosen.get("embedding", "none") != "none":
        if recipe.tier != "per-layer" or recipe.hidden != "none":
            raise ConfigError("--embedding low-rank needs --tier per-layer and --hidden none; add them.")
        if recipe.allocation not in ("auto", "sensitivity"):
            raise ConfigError(f"--embedding low-rank goes with --allocation sensitivity, not {recipe.allocation}.")
    if recipe.ffn == "none" or not recipe.solves or recipe.hidden != "none":
        if chosen.get("up_steps", 0) > 0:
            raise ConfigError("--up-steps needs --ffn, least squares as --correction, and --hidden none; leave it out.")
        recipe = replace(recipe, up_steps=0)
    if recipe.allocation == "auto":
        by_profile = recipe.depth != "none" or (recipe.tier == "per-layer" and recipe.hidden == "none")
        own = "flap" if name == "flap" and recipe.depth == "none" else "sensitivity"
        recipe = replace(recipe, allocation=own if by_profile else "uniform")
    if recipe.allocation == "flap" and recipe.heads != "none":
        raise ConfigError("--allocation flap is for FFN neurons alone; leave --heads none, or choose another.")
    if recipe.tier != "per-layer" or recipe.hidden != "none" or recipe.allocation != "sensitivity":
        recipe = replace(recipe, embedding="none")
    return recipe
