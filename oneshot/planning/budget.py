"""The bound of a plan, and the steps between sizes."""

from collections.abc import Callable
from dataclasses import dataclass

from oneshot.families import StackShape

MAX_ROUND_TO = 64


@dataclass(frozen=True)
class Budget:
    """The bound of a plan: `measure` of its sizes comes near to `target` or stays below it, in `unit`s."""

    target: float
    measure: Callable[[StackShape], float] = StackShape.stored_parameters
    unit: str = "parameters"

    def show(self, amount: float) -> str:
        """Return `107,972,928 parameters` or `0.0131 seconds`."""
        return f"{amount:,.4f} {self.unit}" if self.unit == "seconds" else f"{amount:,.0f} {self.unit}"


def default_round_to(size: int) -> int:
    """Return the largest power of two up to 64 that is at most 1/16 of a width; GPUs and quantisers like multiples."""
    step = MAX_ROUND_TO
    while step > 1 and step * 16 > size:
        step //= 2
    return step
