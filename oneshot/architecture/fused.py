"""Tensors that a checkpoint stores otherwise than we name them: fused linears, and experts by themselves."""

from collections.abc import Mapping, Sequence

import torch

from oneshot.architecture.stack import Stack
from oneshot.tensors import Tensors

PARTS = ("weight", "bias")


def split(tensors: Mapping[str, torch.Tensor], stack: Stack) -> Tensors:
    """Return a layer's tensors as linears have them: `(outputs, inputs)`, and every fused linear as its parts.

    The first part has a row for every column that the sublayer's writer reads. The others share the rest equally.
    Parts are views of the rows, or copies if the rows are head by head.
    """
    split_up = _transposed(tensors if stack.experts is None else stack.experts.from_class(tensors), stack)
    for fused, linears in stack.fused.items():
        writer = next(each.writer for each in stack.sublayers if linears[0] in each.readers)
        first = split_up[f"{writer}.weight"].shape[1]
        for part in PARTS:
            whole = split_up.pop(f"{fused}.{part}", None)
            if whole is not None:
                rows = _rows_of_parts(whole, len(linears), first, stack.fused_heads)
                split_up |= {f"{linear}.{part}": own for linear, own in zip(linears, rows, strict=True)}
    return split_up


def part_of_output(output: torch.Tensor, linear: str, stack: Stack, first: int) -> torch.Tensor:
    """Return what is a linear's own in the output `(…, n)` of the linear that it is stored in.

    `first`: the outputs of the first part.
    """
    linears = stack.fused.get(stack.stored_linear(linear))
    if linears is None:
        return output
    parts = _rows_of_parts(output.movedim(-1, 0), len(linears), first, stack.fused_heads)
    return parts[linears.index(linear)].movedim(0, -1)


def _rows_of_parts(whole: torch.Tensor, parts: int, first: int, heads: int) -> Sequence[torch.Tensor]:
    """Return the rows of each part of a fused linear, of which the first has so many; `heads` as `fused_heads`."""
    if heads:
        return [rows.flatten(0, 1) for rows in whole.unflatten(0, (heads, parts, -1)).unbind(1)]
    each = (len(whole) - first) // (parts - 1)
    return whole.split([first, *[each] * (parts - 1)])


def fuse(tensors: Mapping[str, torch.Tensor], stack: Stack) -> Tensors:
    """Return the inverse of `split`."""
    fused_again = dict(tensors)
    for fused, linears in stack.fused.items():
        for part in PARTS:
            if f"{linears[0]}.{part}" in tensors:
                rows = [fused_again.pop(f"{linear}.{part}") for linear in linears]
                if stack.fused_heads:
                    rows = [torch.stack([one.unflatten(0, (stack.fused_heads, -1)) for one in rows], 1).flatten(0, 2)]
                fused_again[f"{fused}.{part}"] = torch.cat(rows)
    stored = _transposed(fused_again, stack)
    return stored if stack.experts is None else stack.experts.to_class(stored)


def _transposed(tensors: Mapping[str, torch.Tensor], stack: Stack) -> Tensors:
    """Return the tensors with weights of transposed linears the other way round."""
    names = {f"{linear}.weight" for linear in stack.transposed}
    return {name: tensor.T.contiguous() if name in names else tensor for name, tensor in tensors.items()}


def from_files(tensors: Mapping[str, torch.Tensor], stack: Stack) -> Tensors:
    """Return a layer's tensors, named without the layer's prefix, under our names."""
    experts = stack.experts
    return split(tensors if experts is None else experts.from_files(tensors), stack)


def to_files(tensors: Mapping[str, torch.Tensor], stack: Stack) -> Tensors:
    """Return the inverse of `from_files`."""
    fused, experts = fuse(tensors, stack), stack.experts
    return fused if experts is None else experts.to_files(fused)


def stored_shapes(shapes: Mapping[str, tuple[int, ...]], stack: Stack) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors as they are stored."""
    with torch.device("meta"):
        empty = {name: torch.empty(shape) for name, shape in shapes.items()}
        return {name: tuple(tensor.shape) for name, tensor in to_files(empty, stack).items()}
