"""The bound of a plan, and the steps between sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oneshot.architecture import ModelShape, StackShape
from oneshot.errors import PlanError

MAX_ROUND_TO = 64
MISSED_SHARE = 0.05  # of what was to be removed, from which on a plan that misses its target is told
T = TypeVar("T")


@dataclass(frozen=True)
class Budget:
    """The bound of a plan: `measure` of its sizes comes near to `target`, in `unit`s.

    `is_ceiling`: it never exceeds the target, as users mean a number of parameters or of bytes.
    """

    target: float
    measure: Callable[[StackShape], float] = StackShape.stored_parameters
    unit: str = "parameters"
    is_ceiling: bool = False

    def choose(self, options: Sequence[T], measures: Sequence[float]) -> T:
        """Return the option whose measure is nearest to the target, below a ceiling if any is; else the smallest."""
        pairs = list(zip(options, measures, strict=True))
        if self.is_ceiling:
            pairs = [pair for pair in pairs if pair[1] <= self.target] or [min(pairs, key=lambda pair: pair[1])]
        return min(pairs, key=lambda pair: abs(pair[1] - self.target))[0]

    def show(self, amount: float) -> str:
        """Return `107,972,928 parameters` or `0.0131 seconds`."""
        return f"{amount:,.4f} {self.unit}" if self.unit == "seconds" else f"{amount:,.0f} {self.unit}"


class OutOfReachError(PlanError):
    """A target is below the `least` that a recipe gets down to.

    `advice`: what reaches the target, or which target is within reach, as somebody has tried it.
    """

    def __init__(self, budget: Budget, least: float, advice: str = "choose another --recipe or --form") -> None:
        super().__init__(
            f"The target is {budget.show(budget.target)}, but this recipe gets down to {budget.show(least)} at best; "
            f"{advice}."
        )
        self.budget, self.least = budget, least


def missed_target(budget: Budget, dense: float, planned: float) -> str | None:
    """Return a sentence if a plan removes clearly more or less than was asked for; else None.

    `dense`, `planned`: measures of the dense model and of the plan.
    """
    asked, removed = dense - budget.target, dense - planned
    if abs(removed - asked) <= MISSED_SHARE * asked:
        return None
    return (
        f"The plan removes {removed / dense:.2%} of the {budget.unit} where {asked / dense:.2%} was asked for: widths "
        "have steps (--round-to), heads, experts and layers go whole, and what is predicted to cost nothing goes too."
    )


def default_round_to(size: int) -> int:
    """Return the largest power of two up to 64 that is at most 1/16 of a width; GPUs and quantisers like multiples."""
    step = MAX_ROUND_TO
    while step > 1 and step * 16 > size:
        step //= 2
    return step


def width_step(shape: ModelShape, round_to: int | None) -> int:
    """Return the step between FFN widths; `round_to`: as stated, None for what suits the model."""
    return round_to or max(default_round_to(shape.intermediate_size), shape.width_step)
