"""Layers that are stored under the names of another family."""

from abc import ABC, abstractmethod

from oneshot.architecture import Description
from oneshot.checkpoint import Model
from oneshot.tensors import Tensors


class RenamedLayers(ABC):
    """A form that names the tensors of every layer as another family does."""

    @abstractmethod
    def names_of(self, model: Model) -> Description:
        """Return the family whose names a model's layers are stored under."""

    def layer_prefix(self, model: Model, number: int) -> str:
        """Return what the stored names of a layer begin with."""
        return self.names_of(model).stack.layer_prefix(number)

    def layer(self, model: Model, number: int, tensors: Tensors) -> Tensors:
        """Return a layer's tensors under their stored names."""
        prefix, renamed = self.layer_prefix(model, number), model.family.rename(tensors, self.names_of(model))
        return {prefix + name: tensor for name, tensor in renamed.items()}

    def original(self, model: Model, number: int, stored: Tensors) -> Tensors:
        """Return the inverse of `layer`."""
        prefix = self.layer_prefix(model, number)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
        return self.names_of(model).rename(tensors, model.family)
