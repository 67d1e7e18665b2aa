"""The smallest size whose predicted loss is allowed (`--max-loss`)."""

import math
from dataclasses import replace

from oneshot.config import Target
from oneshot.errors import ConfigError, PlanError
from oneshot.method import Method
from oneshot.planning.damages import Damages, predicted_damage
from oneshot.planning.grid import Grid
from oneshot.planning.sizes import make_plan

# On text of other kinds than the calibration's, for each that damages of single sublayers add up to; the check at the
# end of a run measures it for the model at hand.
LOST_FOR_PREDICTED = 1.7
STEP = 0.005  # of removed shares
MOST = 180  # steps


def with_share(target: Target, share: float) -> Target:
    """Return a target that asks for a removed share of the stored parameters instead of a loss."""
    return replace(target, sparsity=share, max_loss=None, loss_scale=None)


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
        try:
            plan = make_plan(grid, method, with_share(target, steps * STEP), damages)
        except (ConfigError, PlanError):  # no plan is so small
            return math.inf
        return scale * predicted_damage(plan, grid.shape, sensitivity)

    fits, exceeds = 0, MOST
    while exceeds - fits > 1:
        steps = (fits + exceeds) // 2
        fits, exceeds = (steps, exceeds) if predicted(steps) <= allowed else (fits, steps)
    if not fits:
        raise PlanError(
            f"Removing {STEP:.1%} of the parameters is predicted to raise the perplexity by "
            f"{math.expm1(predicted(1)):.1%}, and --max-loss {target.max_loss:.1%} is allowed; allow more."
        )
    return with_share(target, round(fits * STEP, 3))
