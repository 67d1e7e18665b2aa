"""Numbers beyond float32: what is refused, and what is told, by the layer and by its largest weight."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from oneshot.errors import CheckpointError
from oneshot.report.records import SublayerReport

logger = logging.getLogger(__name__)


class SumsOverflowError(CheckpointError):
    """Sums over activations are not finite."""


def refuse_overflow(*sums: torch.Tensor) -> None:
    """Raise `SumsOverflowError` if a sum of products is not finite."""
    extremes = [extreme for each in sums for extreme in each.aminmax()]
    if not torch.isfinite(torch.stack(extremes)).all():
        raise SumsOverflowError("Activations overflow to NaN or Inf; run with --dtype float32 or check the weights.")


@contextmanager
def naming_the_layer(layer: int, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> Iterator[None]:
    """Let a `SumsOverflowError` inside the block name the layer and the largest weight of its `tensors()`."""
    try:
        yield
    except SumsOverflowError as error:
        raise CheckpointError(
            f"The activations of layer {layer} overflow to NaN or Inf, where the largest weight is "
            f"{_largest(tensors())}; run with --dtype float32 or check the weights of this layer and those before it."
        ) from error


def gradients_overflow(layer: int, tensors: Mapping[str, torch.Tensor]) -> CheckpointError:
    """Return the error of gradients that are not finite in a layer with these tensors, though activations are."""
    return CheckpointError(
        f"The gradients of layer {layer} overflow to NaN or Inf, where the largest weight is {_largest(tensors)}; add "
        "--set curvature=none, which needs none, or check the weights of this layer."
    )


def warn_of_overflow(layer: int, reports: Sequence[SublayerReport], tensors: Mapping[str, torch.Tensor]) -> None:
    """Warn of sublayers whose errors or condition numbers are not finite."""
    for report in reports:
        numbers = (report.predicted_error, report.measured_error, report.condition_number, report.max_interpolation)
        if not all(number is None or math.isfinite(number) for number in numbers):
            logger.warning(
                "Layer %d, %s: squares of its numbers are beyond float32, so an error is not known; the largest weight "
                "of the layer is %s.",
                layer,
                report.kind,
                _largest(tensors),
            )


def _largest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the largest magnitude of a layer's weights, and the tensor that has it."""
    sizes = {name: float(tensor.abs().max()) for name, tensor in tensors.items() if tensor.numel()}
    name = max(sizes, key=lambda one: sizes[one])
    return f"{sizes[name]:.1e} in {name}"
