"""What a dense sublayer gives on the probe sequences, and what a change of it costs."""

import torch

from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.curvature import mean_cost
from oneshot.stream import Layer


class SublayerOutput:
    """The output of a dense sublayer, to compare with the outputs of reduced ones.

    Args:
        x: the stream before the sublayer, `(sequences, length, D)`.
        branch_norm: the norm that may follow the writer, if changes are weighed by a curvature. They are then measured
            at the writer's output, divided by each token's root mean square.

    Attributes:
        x: the same. total: the sum of the stream and the sublayer, as `Layer.sum` returns it.
    """

    def __init__(self, dense: Layer, index: int, x: torch.Tensor, branch_norm: BranchNorm | None) -> None:
        self.x, self._index = x, index
        self._written: torch.Tensor | None = None
        if branch_norm is None:
            self.total = dense.sum(index, x)
            return
        self._written, added, self.total = _parts(dense, index, x)
        self._scales = branch_norm.scales(self._written, added)

    def compare(self, reduced: Layer, curvature: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean cost of a reduced layer's change over tokens, a float64 scalar, and the layer's `total`.

        The cost is in nats by the `curvature` of the writer's output; without one it is the squared norm of the change.
        """
        if self._written is not None:
            assert curvature is not None
            written, _, total = _parts(reduced, self._index, self.x)
            return mean_cost((written - self._written).float() * self._scales, curvature), total
        total = reduced.sum(self._index, self.x)
        if curvature is None:
            return (total - self.total).double().square().sum(-1).mean(), total
        return mean_cost(reduced.before_sum(total - self.total), curvature), total


def _parts(layer: Layer, index: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the writer writes and what the stream gets of it, as rows `(tokens, D)`, and their sum with it."""
    written = layer.write(index, layer.inner(index, x))
    added = layer.added(index, written)
    return written, added, layer.base(index, x) + added.view_as(x)
