"""Matrices of low rank in the files of our results, multiplied out as they are read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from oneshot.checkpoint.dtypes import ITEM_BYTES
from oneshot.checkpoint.quantised import QuantisedWeight, Shapes
from oneshot.errors import CheckpointError

PANEL_ROWS = 256  # of a matrix, that are multiplied at once in float64


@dataclass(frozen=True)
class LowRank:
    """Name the stored tensors of rows of a matrix `(m, n)`, of rank r or whole.

    `columns (m, r)`: r of its columns. `others (n − r, r)`: what makes the others from them; empty for whole rows.
    `order (n,)`: the numbers of both.
    """

    columns: str
    others: str = ""
    order: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the stored tensors."""
        return (self.columns, self.others, self.order) if self.others else (self.columns,)

    def width(self, shapes: Shapes) -> int:
        """Return the columns of the matrix, by the shapes of the stored tensors."""
        return shapes[self.order][0] if self.others else shapes[self.columns][1]

    def bytes_beside(self, shapes: Shapes, dtypes: Mapping[str, str]) -> int:
        """Return what multiplying takes beside the matrix: pages of the files, a factor and a panel in float64."""
        pages = sum(math.prod(shapes[name]) * ITEM_BYTES[dtypes[name]] for name in self.names)
        in_float64 = math.prod(shapes[self.others]) + 2 * PANEL_ROWS * self.width(shapes) if self.others else 0
        return pages + ITEM_BYTES["F64"] * in_float64


def multiplied(
    parts: Sequence[LowRank],
    shapes: Shapes,
    dtypes: Mapping[str, str],
    quantised: Mapping[str, QuantisedWeight],
    places: str = "",
) -> QuantisedWeight:
    """Return the matrix whose rows these parts have; it is rounded once to its stored dtype.

    `quantised`: weights by name, which are dequantised before if a part has them. `places`: the tensor that says where
    in the parts each row of the matrix is; without it they are one after the other.
    """
    size = sum(shapes[part.columns][0] for part in parts), parts[0].width(shapes)
    names, inner = {places: places} if places else dict[str, str](), dict[str, QuantisedWeight]()
    for name in (name for part in parts for name in part.names):
        if name in quantised:
            inner[name] = quantised[name]
            names |= {f"{name} {role}": file for role, file in quantised[name].parts.items()}
        else:
            names[name] = name
    return QuantisedWeight(names, size, dtypes[parts[0].columns], partial(_dequantised, inner, parts, size, places))


def _dequantised(
    inner: Mapping[str, QuantisedWeight],
    parts: Sequence[LowRank],
    size: tuple[int, int],
    places: str,
    tensors: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return the matrix as `_whole`, of which some tensors are quantised."""
    values = {
        name: weight.values({role: tensors[f"{name} {role}"] for role in weight.parts})
        for name, weight in inner.items()
    }
    return _whole(parts, size, places, {**tensors, **values})


def _whole(
    parts: Sequence[LowRank], size: tuple[int, int], places: str, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the matrix. Raises `CheckpointError` for an order that does not list every column or row once."""
    whole, lengths = tensors[parts[0].columns].new_empty(size), [len(tensors[part.columns]) for part in parts]
    rows_of = torch.arange(size[0])
    if places:
        if not torch.equal(tensors[places].sort().values, rows_of):
            raise CheckpointError(f"{places} does not list every place once; give an undamaged checkpoint.")
        rows_of = tensors[places].argsort()
    for part, own in zip(parts, rows_of.split(lengths), strict=True):
        columns = tensors[part.columns]
        if not part.others:
            whole[own] = columns
            continue
        others, order, rank = tensors[part.others], tensors[part.order], columns.shape[1]
        if others.shape != (size[1] - rank, rank) or not torch.equal(order.sort().values, torch.arange(size[1])):
            raise CheckpointError(f"{part.order} does not list every column once; give an undamaged checkpoint.")
        factor = others.double().T
        for rows, to in zip(columns.split(PANEL_ROWS), own.split(PANEL_ROWS), strict=True):
            every = rows.new_empty(len(rows), size[1])
            every[:, order[:rank]] = rows
            every[:, order[rank:]] = (rows.double() @ factor).to(every.dtype)
            whole[to] = every
    return whole
