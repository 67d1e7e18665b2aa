"""A step of the dense stream that keeps what targets and Grams are made of."""

import torch

from oneshot.stream.layer import Layer


class DensePass:
    """A deferred sublayer step of the dense stream; it keeps the present batch `before` it and its `sum`."""

    def __init__(self, index: int, layer: Layer) -> None:
        self._index, self._layer = index, layer
        self.before = self.sum = torch.empty(0)

    def __call__(self, x: torch.Tensor, _: bool) -> torch.Tensor:
        self.before, self.sum = x, self._layer.sum(self._index, x)
        return self._layer.leave(self._index, self.sum)
