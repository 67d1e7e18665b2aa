"""Statistics of the experts of a mixture, or of a group of them, summed in one pass over the text.

An expert reads `h (m)` of the tokens that the router sends to it, and the layer adds `g W h`, weighted by its gate `g`.
So its rows are `a = g h`, and its Gram is `Σ g² h hᵀ`. The Gram of all experts together, `(E m)²` numbers, is not
needed.
"""

from dataclasses import dataclass

import torch

from oneshot.compression.overflow import refuse_overflow
from oneshot.compression.statistics import Statistics
from oneshot.linalg.sums import add_grams_, add_products_, as_float32, finished_gram
from oneshot.machine import ALONE, Workers
from oneshot.stream import Routing

SUMMED_TOGETHER = 8  # Grams of experts, over processes


@dataclass(frozen=True)
class ExpertStatistics:
    """Sums over the calibration text for every expert of a group of `n`, as in `Statistics`.

    Attributes:
        group: numbers of the experts.
        grams: `(n, m, m)` float32. residuals: `(n, m, D)` float32, or None. residual_energies: `(n,)` float64.
        shared: statistics of the shared expert if it shrinks with the others; else None.
        num_rows, num_targets: int64 `(E,)` on the host: tokens that each of all experts saw, and those that had a
            target.
    """

    group: range
    grams: torch.Tensor
    residuals: torch.Tensor | None
    residual_energies: torch.Tensor
    num_rows: torch.Tensor
    num_targets: torch.Tensor
    shared: Statistics | None = None

    def of(self, expert: int) -> Statistics:
        """Return the statistics of one expert, by its number; without a residual if no token of it had a target."""
        rows, targets, place = int(self.num_rows[expert]), int(self.num_targets[expert]), self.group.index(expert)
        residual = None if self.residuals is None or not targets else self.residuals[place]
        return Statistics(self.grams[place], residual, self.residual_energies[place], rows, targets)


def squared_gates(gates: torch.Tensor, *, with_shared: bool) -> torch.Tensor:
    """Return the sum `(tokens,)` of the squared gates among which a token's residual is shared, float32.

    `Σ_e g_e δ_e = r` has the solution of least norm `δ_e = g_e r / Σ_j g_j²`. The gate of a shared expert is 1.
    """
    return (gates.float().square().sum(1) + with_shared).clamp_min(torch.finfo(torch.float32).tiny)


class ExpertAccumulator:
    """Sum Grams `(n, m, m)` and residuals `(n, m, D)` of `n` experts of a layer, as `GramAccumulator`.

    Args:
        count: all experts `E`. group: the numbers of these. size: neurons `m` of each. output_size: `D` if rows may
            have a target, None otherwise.
    """

    def __init__(
        self, count: int, size: int, *, output_size: int | None, device: torch.device, group: range | None = None
    ) -> None:
        self._group = range(count) if group is None else group
        self._grams = torch.zeros(len(self._group), size, size, dtype=torch.float64, device=device)
        self._residuals = None
        if output_size is not None:
            self._residuals = torch.zeros(len(self._group), size, output_size, dtype=torch.float64, device=device)
        self._energies = torch.zeros(len(self._group), dtype=torch.float64, device=device)
        self._counts = torch.zeros(2, count, dtype=torch.float64, device=device)

    def update_(
        self,
        routing: Routing,
        lost: torch.Tensor | None = None,
        *,
        with_shared: bool = False,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Add a batch.

        Args:
            lost: `(tokens, D)`, what the layer lacks of its target; None without one. It is shared among the experts of
                a token (`squared_gates`). with_shared: the shared expert also takes its share. scales: what tokens
                count by beside their gates, `(tokens, 1)` (`MixtureNorms.scales`); None for one.
        """
        self._counts[: 1 if lost is None else 2] += routing.counts
        weights = None
        if lost is not None:
            squares = squared_gates(routing.gates, with_shared=with_shared)
            weights = (routing.gates.float().square() / squares.unsqueeze(1)).to(lost.dtype)
        for one in routing.arrivals(self._group, weights):
            share = None
            if lost is not None and one.weights is not None:
                share = lost[one.tokens] * one.weights.unsqueeze(-1)
            rows = one.neurons * one.gates.unsqueeze(-1)
            rows = rows if scales is None else rows * scales[one.tokens].to(rows)
            self._add_(one.experts, rows, share)

    def _add_(self, experts: range, rows: torch.Tensor, lost: torch.Tensor | None) -> None:
        """Add rows of experts: `a (n, r, m)`; and `lost (n, r, D)`, what `a Wᵀ` lacks of a target, if there is one."""
        places = slice(experts.start - self._group.start, experts.stop - self._group.start)
        add_grams_(self._grams[places], rows)
        if lost is not None:
            assert self._residuals is not None
            add_products_(self._residuals[places], rows, lost)
            self._energies[places] += lost.float().square().sum((1, 2))

    def finish(self, workers: Workers = ALONE) -> ExpertStatistics:
        """Return the sums over the rows of all workers as a record; residuals are scaled to all rows of their expert.

        Raises `CheckpointError` if the activations were not finite.
        """
        workers.sum_grams_(*self._grams.split(SUMMED_TOGETHER))
        workers.sum_(self._energies, self._counts)
        grams = torch.empty_like(self._grams, dtype=torch.float32)
        for own, total in zip(grams, self._grams, strict=True):
            own.copy_(finished_gram(total))
        del self._grams
        of_group = self._counts[:, self._group.start : self._group.stop]
        scales, residuals = of_group[0] / of_group[1].clamp_min(1), None
        if self._residuals is not None:
            workers.sum_(self._residuals)
            residuals = as_float32(self._residuals).mul_(scales.float().view(-1, 1, 1))
            del self._residuals
        refuse_overflow(grams, *(() if residuals is None else (residuals,)))
        rows, targets = self._counts.long().cpu()
        return ExpertStatistics(self._group, grams, residuals, scales * self._energies, rows, targets)
