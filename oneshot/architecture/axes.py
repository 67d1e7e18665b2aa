"""Axes of a layer's tensors: which dimension is the stream, neurons, heads, KV groups or experts; and one cut of them.

A mixer states once for each of its tensors the axes of every dimension. `("heads key", "stream")`, of the linear of
queries, has a row for every coordinate of a key in every head, and a column for every coordinate of the stream. The
shapes of tensors follow from the sizes of the axes, and what stays of them from the indices that stay.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from oneshot.tensors import Tensors

Dims = tuple[str, ...]  # of every dimension of a tensor the axes, or numbers, whose product its size is
Axes = dict[str, Dims]  # by the tensor's name


def linear(name: str, outputs: str, inputs: str, *, biased: bool) -> Axes:
    """Return the axes of a linear's weight and of its bias."""
    weight: Axes = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if biased else weight


def shapes_of(axes: Axes, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors whose axes have these sizes."""
    return {
        name: tuple(math.prod(sizes[one] if one in sizes else int(one) for one in dim.split()) for dim in dims)
        for name, dims in axes.items()
    }


def cut(
    tensors: Tensors, axes: Axes, kept: Mapping[str, torch.Tensor], sizes: Mapping[str, int] = MappingProxyType({})
) -> Tensors:
    """Return the layer whose axes have only some of their indices; tensors without these axes are the same.

    Args:
        axes: the axes of tensors, also of some that the layer lacks.
        kept: int64 `(k,)`, ascending, by the name of the axis; or `(E, k)` if every expert, of which a tensor has one
            at each index of its first dimension, keeps indices of its own.
        sizes: of axes that share a dimension with one of these.
    """
    smaller = dict(tensors)
    for name, dims in axes.items():
        for number, dim in enumerate(dims):
            for axis in kept.keys() & set(dim.split()) if name in tensors else ():
                smaller[name] = _cut(smaller[name], number, dim.split(), axis, kept[axis], sizes)
    return smaller


def _cut(
    tensor: torch.Tensor, dim: int, axes: list[str], axis: str, kept: torch.Tensor, sizes: Mapping[str, int]
) -> torch.Tensor:
    """Return a tensor with these indices of one of the axes of a dimension."""
    split = [-1 if one == axis else sizes[one] if one in sizes else int(one) for one in axes]
    places = torch.arange(tensor.shape[dim], device=kept.device).unflatten(0, split)
    if kept.ndim == 1:
        chosen = places.index_select(axes.index(axis), kept).flatten()
        return tensor.index_select(dim, chosen.to(tensor.device))
    chosen = torch.stack([places.index_select(axes.index(axis), own).flatten() for own in kept]).to(tensor.device)
    experts = torch.arange(len(chosen), device=tensor.device).unsqueeze(1)
    return tensor.movedim(dim, 1)[experts, chosen].movedim(1, dim)
