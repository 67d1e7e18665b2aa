"""What a profile predicts: the loss of a plan, of other forms and sizes, and the size of an allowed loss.

Without a profile, fits to sizes that were measured say which loss to expect (docs/guides/form.md).
"""

import contextlib
import math
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from oneshot.architecture import ModelShape
from oneshot.config import Target
from oneshot.errors import ConfigError, PlanError
from oneshot.method import Method
from oneshot.planning.budget import Budget
from oneshot.planning.curves import Profile
from oneshot.planning.damages import Damages, is_priced, predicted_damage, profiled_damages
from oneshot.planning.grid import Grid
from oneshot.planning.plan import Plan
from oneshot.planning.sizes import make_plan

# On text of other kinds than the calibration's, for each that damages of single sublayers add up to; the check at the
# end of a run measures it for the model at hand.
LOST_FOR_PREDICTED = 1.7
# The same beside rounding, whose loss is predicted within a tenth: of SmolLM2 in 70 MB from 8,192 tokens
# (benchmarks/records/experiments.md). Thus a loss that is known is preferred to one that is only estimated.
LOST_BESIDE_ROUNDING = 2.2
LEAST_SHARE = 0.005  # between removed shares that a loss is tried at
MOST, COARSE = 180, 5  # steps, and those between shares that are tried first beside types
CURVE_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def with_share(target: Target, share: float) -> Target:
    """Return a target that asks for a removed share of the stored parameters instead of a loss or another size."""
    return replace(target, sparsity=share, parameters=None, size_bytes=None, max_loss=None, loss_scale=None)


def _plan_without(share: float, grid: Grid, method: Method, target: Target, damages: Damages) -> Plan | None:
    """Return the plan that removes a share of the stored parameters; None if no plan is so small."""
    with contextlib.suppress(PlanError, ConfigError):
        return make_plan(grid, method, with_share(target, share), damages)
    return None


def within_loss(grid: Grid, method: Method, target: Target, damages: Damages, sensitivity: Damages) -> Target:
    """Return the target of the largest share that may go by the predicted loss, in steps of half a per cent.

    A rise of the perplexity by a share s is `log(1 + s)` nats for a token.

    Args:
        damages: by which sizes are planned. sensitivity: those in nats, of the same profile.

    Raises `PlanError`, with the least that is predicted, if the smallest share loses more.
    """
    assert target.max_loss is not None
    scale = LOST_FOR_PREDICTED if target.loss_scale is None else target.loss_scale
    allowed = math.log1p(target.max_loss)

    def predicted(steps: int) -> float:
        plan = _plan_without(steps * LEAST_SHARE, grid, method, target, damages)
        return math.inf if plan is None else scale * predicted_damage(plan, sensitivity)

    fits = bisect(range(1, MOST), allowed, key=predicted)
    if not fits:
        least = 100 * math.expm1(predicted(1))
        raise PlanError(
            f"Removing {LEAST_SHARE:.1%} of the parameters is predicted to raise the perplexity by {least:.2g}%, and "
            f"--max-loss {100 * target.max_loss:.3g}% is allowed; allow more."
        )
    return with_share(target, round(fits * LEAST_SHARE, 3))


@dataclass(frozen=True)
class SharedLoss:
    """How much goes where parameters may go and the others be rounded, and what each is predicted to lose.

    Attributes:
        target: of the removed share. removal, rounding: in nats a token. rounding_alone: if nothing goes; infinite if
            nothing is so small then.
    """

    target: Target
    removal: float
    rounding: float
    rounding_alone: float


def beside_rounding(
    grid: Grid,
    method: Method,
    target: Target,
    damages: Damages,
    sensitivity: Damages,
    rounding: Callable[[Plan], float],
) -> SharedLoss:
    """Return the share whose removal and rounding together lose least by prediction.

    Shares are tried in steps of 2.5 %, and around the best of them in steps of half a per cent.

    Args:
        damages, sensitivity: as of `within_loss`. rounding: the least loss in nats of rounding what a plan keeps to the
            bytes that are there; infinite if nothing is so small.

    Raises `PlanError` if no share is small enough.
    """

    @cache
    def losses(steps: int) -> tuple[float, float]:
        plan = _plan_without(steps * LEAST_SHARE, grid, method, target, damages)
        if plan is None:
            return math.inf, math.inf
        return LOST_BESIDE_ROUNDING * predicted_damage(plan, sensitivity), rounding(plan)

    def total(steps: int) -> float:
        return sum(losses(steps))

    best = 0
    for steps in range(0, MOST + 1, COARSE):
        best = min(best, steps, key=total)
        if math.isfinite(total(best)) and losses(steps)[0] >= total(best):  # more removal only loses more
            break
    best = min(range(max(0, best - COARSE + 1), min(MOST, best + COARSE)), key=total)
    if not math.isfinite(total(best)):
        raise PlanError("No size of this model's layers is small enough for --max-file-size; give more.")
    return SharedLoss(with_share(target, round(best * LEAST_SHARE, 3)), *losses(best), losses(0)[1])


def predicted_divergences(
    grids: Mapping[str, Grid], method: Method, target: Target, plan: Plan, profile: Profile, budget: Budget
) -> dict[str, float]:
    """Return the KL divergence of the output from the dense model's, in nats per token, as the profile predicts it.

    It is given for the `plan`, and for the best plan of each form (`grids`) for the same target, which shows what a
    form costs. The `method` is not settled: each form settles its own. Small numbers are more reliable than large
    ones, because damages are assumed to add up. Plans with sizes that were not measured are left out; nothing is given
    if the `plan` is one.
    """
    damages = profiled_damages(profile, "sensitivity", next(iter(grids.values())))
    if not is_priced(plan, damages):
        return {}
    predicted = {"plan": predicted_damage(plan, damages)}
    for form, grid in grids.items():
        with contextlib.suppress(PlanError, ConfigError):
            other = make_plan(grid, grid.settle(method, target), target, damages, budget)
            if is_priced(other, damages):
                predicted[form] = predicted_damage(other, damages)
    return predicted


def predicted_curve(grid: Grid, method: Method, target: Target, damages: Damages) -> dict[str, float]:
    """Return the divergence as `predicted_divergences` for other removed shares of the stored parameters, by share.

    Shares that the form or the method does not reach are left out. A target that counts something else has no curve.

    Args:
        method: settled for this grid. damages: by `sensitivity`.
    """
    shares = CURVE_SHARES if target.budget == "parameters" else ()
    plans = {str(share): _plan_without(share, grid, method, target, damages) for share in shares}
    return {
        share: predicted_damage(plan, damages)
        for share, plan in plans.items()
        if plan is not None and is_priced(plan, damages)
    }


MANY_NEURONS = 0.5  # the share of FFN neurons beyond which equal layers are warned of
NATS_OF_NEURONS = 1.6  # for all of them, in equal layers: 1.2 to 1.9 in three models
MEASURED_SHARE = 0.3  # of the parameters, up to which the per-layer form was measured
NATS_OF_PARAMETERS = 7.0  # for the square of their removed share, in the per-layer form: 1.8 to 7.3


def removed_neurons(plan: Plan, shape: ModelShape) -> float:
    """Return the share of all FFN neurons that a plan removes; 0 if the model has none."""
    dense = sum(shape.of(layer).intermediate_size for layer in range(len(plan.layers)))
    return 1 - sum(kept.intermediate_size for kept in plan.layers) / dense if dense else 0.0


def expected_of_equal_layers(neurons: float) -> float:
    """Return the perplexity ÷ the dense model's to expect of equal layers without this share of FFN neurons."""
    return math.exp(NATS_OF_NEURONS * neurons)


def expected_of_own_sizes(share: float) -> float:
    """Return at most what to expect of the per-layer form without so much of the parameters, up to `MEASURED_SHARE`."""
    return math.exp(NATS_OF_PARAMETERS * share**2)
