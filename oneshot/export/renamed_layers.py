"""Layers that are stored under the names of another family."""

from abc import ABC, abstractmethod

import torch

from oneshot.checkpoint import Model
from oneshot.families import Description

Tensors = dict[str, torch.Tensor]


class RenamedLayers(ABC):
    """A form that names the tensors of every layer as another family does."""

    @abstractmethod
    def names_of(self, model: Model) -> Description:
        """Return the family whose names a model's layers are stored under."""

    def layer(self, model: Model, number: int, tensors: Tensors) -> Tensors:
        """Return a layer's tensors under their stored names."""
        other = self.names_of(model)
        prefix = other.stack.layer_prefix(number)
        return {prefix + name: tensor for name, tensor in model.family.rename(tensors, other).items()}

    def original(self, model: Model, number: int, stored: Tensors) -> Tensors:
        """Return the inverse of `layer`."""
        other = self.names_of(model)
        prefix = other.stack.layer_prefix(number)
        return other.rename({name.removeprefix(prefix): tensor for name, tensor in stored.items()}, model.family)
