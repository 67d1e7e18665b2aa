"""The verdict on a mixture before it is pruned: what narrower and fewer experts are predicted to lose at equal size.

All layers are taken to be equal, as in a stock config.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from oneshot.method import Method
from oneshot.planning.budget import width_step
from oneshot.planning.curves import Profile
from oneshot.planning.damages import Damages, predicted_damage, profiled_damages
from oneshot.planning.grid import Grid
from oneshot.planning.options import expert_counts
from oneshot.planning.plan import Plan, dense_plan
from oneshot.planning.predicted import LOST_FOR_PREDICTED

ALLOWED = (0.01, 0.02, 0.05, 0.1, 0.25)  # rises of the perplexity that a verdict has a size for
LITTLE = 1.05  # two losses that differ by less are taken as equal

Cheaper = Literal["narrower", "fewer", "equal"]


@dataclass(frozen=True)
class MixtureSize:
    """One stored size of a mixture, met by fewer experts, or by narrower ones.

    Attributes:
        removed: share of the model's stored parameters.
        num_experts, intermediate_size: what stays in every layer in one case and in the other; a width between the
            steps that a plan takes stands for the size exactly.
        fewer, narrower: predicted loss in nats per token, with the correction of what stays.
    """

    removed: float
    num_experts: int
    intermediate_size: float
    fewer: float
    narrower: float

    @property
    def cheaper(self) -> Cheaper:
        """Return what is predicted to lose less."""
        low, high = sorted((self.fewer, self.narrower))
        if high <= LITTLE * low:
            return "equal"
        return "narrower" if self.narrower < self.fewer else "fewer"


@dataclass(frozen=True)
class MixtureVerdict:
    """State what may go of a mixture, by one profile.

    Attributes:
        num_experts, per_token, intermediate_size: of the dense model.
        sizes: rising by the removed share, for every number of experts that a layer may keep.
        allowed: by rises of the perplexity, the largest removed shares of the stored parameters by `narrower` and by
            `fewer` experts.
        unseen: experts of all layers that got no token of the profile's text, whose cost counts as none. routed: all
            experts of all layers.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    sizes: tuple[MixtureSize, ...]
    allowed: dict[str, dict[str, float]]
    unseen: int
    routed: int

    @property
    def cheaper(self) -> Cheaper | None:
        """Return what is cheaper at every size, or equal; None if it depends on the size, or without any."""
        found = {size.cheaper for size in self.sizes} - {"equal"}
        if not found:
            return "equal" if self.sizes else None
        return found.pop() if len(found) == 1 else None


def rise_of(nats: float) -> float:
    """Return the share by which a predicted loss raises the perplexity on text of other kinds (`predicted.py`)."""
    return math.expm1(LOST_FOR_PREDICTED * nats)


def mixture_verdict(grid: Grid, profile: Profile) -> MixtureVerdict | None:
    """Return the verdict on a mixture whose profile measured whole experts and neurons; None for other profiles."""
    experts, shape = grid.shape.experts, grid.shape
    measured = bool(profile.expert_errors.numel()) and bool(profile.expert_sensitivity.any())
    if experts is None or not measured or not profile.ffn_sensitivity.any():
        return None
    damages = profiled_damages(profile, "sensitivity", grid)
    unit: Any = profile.origin.head_unit
    dense = dense_plan(shape, Method(ffn="id", heads="none", correction="same-layer", head_unit=unit))
    step = width_step(shape, None)
    widths = [*range(step, shape.intermediate_size, step), shape.intermediate_size]
    counts = expert_counts(experts)
    narrower = _priced(grid, damages, [dense.with_width(width) for width in widths])
    fewer = _priced(grid, damages, [dense.with_sizes(num_experts=count) for count in counts])
    by_size = narrower[0][::-1]
    sizes = tuple(
        MixtureSize(
            removed=removed,
            num_experts=count,
            intermediate_size=float(np.interp(removed, by_size, widths[::-1])),
            fewer=lost,
            narrower=float(np.interp(removed, by_size, narrower[1][::-1])),
        )
        for count, removed, lost in zip(counts, *fewer, strict=True)
        if count < experts.count and removed <= by_size[-1]
    )
    tokens = profile.expert_tokens[profile.expert_tokens.sum(1) > 0] if profile.expert_tokens.numel() else None
    return MixtureVerdict(
        num_experts=experts.count,
        per_token=experts.per_token,
        intermediate_size=shape.intermediate_size,
        sizes=sizes[::-1],
        allowed={str(rise): {"narrower": _most(narrower, rise), "fewer": _most(fewer, rise)} for rise in ALLOWED},
        unseen=0 if tokens is None else int((tokens == 0).sum()),
        routed=0 if tokens is None else tokens.numel(),
    )


def _priced(grid: Grid, damages: Damages, plans: Sequence[Plan]) -> tuple[list[float], list[float]]:
    """Return the removed shares of the stored parameters of plans, and their predicted losses."""
    whole = max(grid.stack(plan).stored_parameters() for plan in plans)  # all are options
    removed = [1 - grid.stack(plan).stored_parameters() / whole for plan in plans]
    return removed, [predicted_damage(plan, damages) for plan in plans]


def _most(priced: tuple[list[float], list[float]], rise: float) -> float:
    """Return the largest removed share whose loss raises the perplexity by at most this share."""
    return max(removed for removed, lost in zip(*priced, strict=True) if rise_of(lost) <= rise)
