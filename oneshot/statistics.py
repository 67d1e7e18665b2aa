"""Additive statistics of activations: update with rows, merge with other workers, finish into a record."""

import torch

from oneshot.records import BlockStatistics


class GramAccumulator:
    """`G = AᵀA` and, for a two-stream target, `R = Aᵀ(Y − A Wᵀ)` over all rows seen (STAT section 3.1).

    Sums in float32 on the device of the activations. Two accumulators over different rows merge by addition, so
    the order, the batch size and the number of workers do not matter beyond rounding.

    Args:
        size: `n`, the number of activations (plus one for a constant column where the linear has a bias).
        output_size: `d` where a residual `R (n, d)` is wanted, None otherwise.
    """

    def __init__(self, size: int, *, output_size: int | None, device: torch.device) -> None:
        self._gram = torch.zeros(size, size, device=device)
        self._residual = None if output_size is None else torch.zeros(size, output_size, device=device)
        self._residual_energy = torch.zeros((), dtype=torch.float64, device=device)
        self._num_rows = 0

    def update_(self, activations: torch.Tensor, residual_target: torch.Tensor | None = None) -> None:
        """Add rows: `activations (m, n)`, and `residual_target (m, d)` where a residual is kept."""
        rows = activations.float()
        self._gram.addmm_(rows.T, rows)
        if self._residual is not None:
            if residual_target is None:
                raise ValueError("this accumulator keeps a residual: give residual_target")
            target = residual_target.float()
            self._residual.addmm_(rows.T, target)
            self._residual_energy += target.double().square().sum()
        self._num_rows += len(rows)

    def merge_(self, other: "GramAccumulator") -> None:
        """Add the statistics of other rows: `stats(X1) + stats(X2) == stats([X1; X2])`."""
        self._gram += other._gram
        if self._residual is not None and other._residual is not None:
            self._residual += other._residual
        self._residual_energy += other._residual_energy
        self._num_rows += other._num_rows

    def finish(self) -> BlockStatistics:
        """The sums as a record (not copied)."""
        return BlockStatistics(self._gram, self._residual, self._residual_energy, self._num_rows)


def with_constant_column(activations: torch.Tensor) -> torch.Tensor:
    """`[A, 1]`: the column that stands for the bias in the regression."""
    return torch.cat((activations, activations.new_ones(len(activations), 1)), dim=1)
