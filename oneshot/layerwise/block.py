"""What compressing attention and compressing the FFN have in common."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from oneshot.config import AUTO, TOKENS_PER_NEURON, CompressionConfig
from oneshot.factorise import best_damping, correct
from oneshot.hidden import StreamSubspaces
from oneshot.layerwise.streams import Streams
from oneshot.recipes import Recipe
from oneshot.records import BlockReport, BlockStatistics, Factors, LayerPlan, ModelShape, Plan
from oneshot.statistics import GramAccumulator, SplitAccumulator

logger = logging.getLogger(__name__)

Solution = TypeVar("Solution")


@dataclass(frozen=True)
class Block:
    """One of the two blocks of a layer: what is wanted of it (`kept`), and the streams that pass it."""

    config: CompressionConfig
    recipe: Recipe
    shape: ModelShape
    plan: Plan
    kept: LayerPlan
    subspaces: StreamSubspaces | None
    streams: Streams
    device: torch.device
    generator: torch.Generator

    @property
    def corrects_slices(self) -> bool:
        """Whether there is something to correct though every neuron and head stays: a stream inside subspaces."""
        return self.subspaces is not None and self.recipe.correction == "two-stream"

    @property
    def follows_dense(self) -> bool:
        """Whether the correction's target comes from the dense stream."""
        return self.recipe.correction == "two-stream"

    def accumulator(self, weight: torch.Tensor) -> GramAccumulator | SplitAccumulator:
        """Statistics of what a linear `(d, n)` consumes, with the dense stream's residual where that is the target."""
        output_size = weight.shape[0] if self.follows_dense else None
        kind = SplitAccumulator if self.config.damping == AUTO and self.recipe.solves else GramAccumulator
        return kind(weight.shape[1], output_size=output_size, device=self.device)

    def enter(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """The compressed stream behind a block, on its way to a position."""
        return x if self.subspaces is None else self.subspaces.enter(x, position)

    def reachable(self, statistics: BlockStatistics, position: int) -> BlockStatistics:
        """The residual within the subspace that the block writes to; its energy counts what lies outside, too."""
        if self.subspaces is None or statistics.residual is None:
            return statistics
        inside = self.subspaces.inside(statistics.residual, position)
        held_out = None if statistics.held_out is None else self.reachable(statistics.held_out, position)
        return replace(statistics, residual=inside, held_out=held_out)

    def shared(self, task: int, solve: Callable[[], Solution]) -> Solution:
        """What one worker solves, on the device of each."""
        workers = self.streams.workers
        if workers.size == 1:
            return solve()
        return moved(workers.share(task, lambda: moved(solve(), "cpu")), self.device)

    def correct(
        self, weight: torch.Tensor, columns: torch.Tensor, statistics: BlockStatistics | None, *, has_bias: bool
    ) -> Factors:
        """Correct a consuming linear over the kept columns; `has_bias`: its last column is the bias, which stays."""
        if has_bias:
            columns = torch.cat((columns, columns.new_tensor([weight.shape[1] - 1])))
        own = "same-layer" if self.recipe.solves else "none"
        if self.recipe.correction == "bias" and has_bias:
            own = "bias"
        correction = "two-stream" if self.follows_dense else own
        share = self.residual_weight(weight.shape[1], None if statistics is None else statistics.num_rows)
        damping = self.config.fixed_damping
        if statistics is not None and statistics.held_out is not None:
            damping = best_damping(weight, columns, statistics, correction=correction, residual_weight=share)
        return correct(weight, columns, statistics, correction=correction, damping=damping, residual_weight=share)

    def residual_weight(self, num_columns: int, num_tokens: int | None) -> float:
        """The share of the dense stream's residual in the target: less of it where tokens are few.

        What little text needs is what that text happens to need: none of it is asked for below `TOKENS_PER_NEURON`
        tokens for each column. A stream inside subspaces has more to make up for, and asks for all that was set.
        """
        if num_tokens is None or self.corrects_slices:
            return self.config.residual_weight
        return self.config.residual_weight * max(0.0, 1 - TOKENS_PER_NEURON * num_columns / num_tokens)


def moved(solution: Any, device: torch.device | str) -> Any:
    """Factors, tensors and tuples of them with every tensor on a device."""
    if isinstance(solution, tuple):
        return tuple(moved(part, device) for part in solution)
    if isinstance(solution, Factors):
        return replace(solution, kept=solution.kept.to(device), weight=solution.weight.to(device))
    return solution.to(device) if isinstance(solution, torch.Tensor) else solution


def warn_if_dead(layer: int, kind: str, gram: torch.Tensor, *, kept: int) -> None:
    """Say where more columns are zero on the whole text than are removed: some of them stay, chosen by nothing.

    Args:
        gram: `AᵀA (n, n)`, the constant column of a bias left out. kept: columns that stay.
    """
    dead, removed = int((gram.diagonal() == 0).sum()), len(gram) - kept
    if dead > removed:
        logger.warning(
            "Layer %d, %s: %d of %d columns are zero on the whole calibration text, more than the %d removed.",
            layer,
            kind,
            dead,
            len(gram),
            removed,
        )


def relative_error(wanted: torch.Tensor, reached: torch.Tensor) -> float:
    """`‖wanted − reached‖ / ‖wanted‖`."""
    energy = wanted.double().norm().clamp_min(torch.finfo(torch.float64).tiny)  # a block may give nothing at all
    return float((wanted - reached).double().norm() / energy)


def block_report(kind: str, dense_size: int, kept_size: int, factors: Factors, measured: float | None) -> BlockReport:
    """What the factors say about a block, and what was measured."""
    return BlockReport(
        kind=kind,
        dense_size=dense_size,
        kept_size=kept_size,
        predicted_error=factors.predicted_error,
        measured_error=measured,
        condition_number=factors.condition_number,
        max_interpolation=factors.max_interpolation,
        eigenvalue_fallback=factors.eigenvalue_fallback,
        damping=factors.damping,
    )
