"""What a plan may take, and the steps that sizes go in."""

from collections.abc import Callable
from dataclasses import dataclass

from oneshot.config import CompressionConfig
from oneshot.records import StackShape

MAX_ROUND_TO = 64


@dataclass(frozen=True)
class Budget:
    """What a plan may take: `measure` of its sizes, at most (or as near as can be to) `target`, in `unit`s."""

    target: float
    measure: Callable[[StackShape], float] = StackShape.stored_parameters
    unit: str = "parameters"

    def show(self, amount: float) -> str:
        """`107,972,928 parameters`, `0.0131 seconds`."""
        return f"{amount:,.4f} {self.unit}" if self.unit == "seconds" else f"{amount:,.0f} {self.unit}"


def wanted_parameters(config: CompressionConfig, dense_parameters: int) -> int:
    """The stored parameters that the target asks for; those of the dense model where sizes say everything."""
    if config.params is not None:
        return config.params
    return round(dense_parameters * (1 - (config.sparsity or 0.0)))


def default_round_to(size: int) -> int:
    """The largest power of two up to 64 that is at most 1/16 of the width (GPUs and quantisers like multiples)."""
    step = MAX_ROUND_TO
    while step > 1 and step * 16 > size:
        step //= 2
    return step
