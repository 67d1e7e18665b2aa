"""What a dense sublayer gives on the probe sequences, and what a change of it costs."""

import torch

from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.curvature import mean_cost
from oneshot.stream import Layer


class SublayerOutput:
    """The output of a dense sublayer, to compare those of reduced ones with.

    Args:
        x: the stream before the sublayer, `(sequences, length, D)`.
        curvature: of the output of the sublayer's writer; None for squared errors of the stream.
        branch_norm: the norm that may follow the writer. With one, changes are measured at the writer's output, divided
            by each token's root mean square.
    """

    def __init__(
        self,
        dense: Layer,
        index: int,
        x: torch.Tensor,
        curvature: torch.Tensor | None,
        branch_norm: BranchNorm | None,
    ) -> None:
        self._index, self._x, self._curvature = index, x, curvature
        self._scales: torch.Tensor | None = None
        if curvature is None or branch_norm is None:
            self._dense = dense.sum(index, x)
        else:
            self._dense = dense.write(index, dense.inner(index, x))
            self._scales = branch_norm.scales(self._dense, dense.added(index, self._dense))

    def cost_of(self, reduced: Layer) -> torch.Tensor:
        """Return the mean cost of a reduced layer's change over tokens, a float64 scalar.

        It is in nats by the curvature; without one it is the squared norm of the change.
        """
        index, x, curvature = self._index, self._x, self._curvature
        if curvature is None:
            return (reduced.sum(index, x) - self._dense).double().square().sum(-1).mean()
        if self._scales is None:
            return mean_cost(reduced.before_sum(reduced.sum(index, x) - self._dense), curvature)
        changed = reduced.write(index, reduced.inner(index, x)) - self._dense
        return mean_cost(changed.float() * self._scales, curvature)
