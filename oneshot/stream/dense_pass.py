"""A step of the dense stream that keeps what targets and Grams are made of."""

import torch

from oneshot.stream.layer import Layer


class DensePass:
    """A deferred sublayer step of the dense stream; it keeps what it adds to, `before`, and the `sum`."""

    def __init__(self, index: int, layer: Layer) -> None:
        self._index, self._layer = index, layer
        self.before = self.sum = torch.empty(0)

    def __call__(self, x: torch.Tensor, _: bool) -> torch.Tensor:
        self.before, self.sum = self._layer.base(self._index, x), self._layer.sum(self._index, x)
        return self._layer.moved(self._index, x, self.sum)
