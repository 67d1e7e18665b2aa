"""A view of a checkpoint whose matrices of low rank are multiplied out when they are read."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from oneshot.checkpoint.dtypes import DTYPES, ITEM_BYTES
from oneshot.checkpoint.reader import Checkpoint
from oneshot.errors import CheckpointError
from oneshot.families import StackShape

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


class Multiplied(Checkpoint):
    """A result of ours, read as a checkpoint of its family's own class.

    A matrix of low rank is multiplied out in float64 when it is read, and rounded once to its stored dtype.

    Args:
        source: the result. config: as the class has it. stated: the sizes of the result, by which it is counted.
        names: of whole tensors, `name in the class -> name in the files`. products: of matrices in parts that follow
            each other, by their names in the class.
    """

    def __init__(
        self,
        source: Checkpoint,
        config: dict[str, Any],
        stated: StackShape,
        names: Mapping[str, str],
        products: Mapping[str, tuple[LowRank, ...]],
    ) -> None:
        self._source, self.folder, self.config, self.stated = source, source.folder, config, stated
        self.has_values, self.weights_at_hand, self.log = source.has_values, source.weights_at_hand, source.log
        self._names, self._products, self._stored_names = dict(names), dict(products), {}
        self.shapes = {name: source.shapes[stored] for name, stored in names.items()}
        self.shapes |= {name: self._size(parts) for name, parts in products.items()}
        self.dtypes = {name: source.dtypes[self._files(name)[0]] for name in self.shapes}

    def _size(self, parts: tuple[LowRank, ...]) -> tuple[int, ...]:
        """Return the shape of a matrix in parts, which all have as many columns."""
        shapes = self._source.shapes
        width = shapes[parts[0].order][0] if parts[0].others else shapes[parts[0].columns][1]
        return sum(shapes[part.columns][0] for part in parts), width

    def _files(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors in the files that a tensor is made of."""
        name = self.stored(name)
        if name in self._names:
            return (self._names[name],)
        return tuple(stored for part in self._products[name] for stored in part.names)

    @property
    def stored_names(self) -> frozenset[str]:
        """Return the names of all tensors as the class has them."""
        return frozenset(self._names) | frozenset(self._products)

    @property
    def num_parameters(self) -> int:
        """Return the stored parameters: every element of every tensor in the files that this view is made of."""
        return super().num_parameters if self.stated is None else self._count(lambda stored: 1)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weight files."""
        return self._source.num_bytes

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of the tensors in the files that this view is made of."""
        dtypes = self._source.dtypes
        return super().tensor_bytes if self.stated is None else self._count(lambda stored: ITEM_BYTES[dtypes[stored]])

    def _count(self, each: Callable[[str], int]) -> int:
        """Return the elements of the tensors in the files that this view is made of, times a number for each."""
        files = {stored for name in self.shapes for stored in self._files(name)}
        return sum(each(stored) * math.prod(self._source.shapes[stored]) for stored in files)

    def whole(self) -> "Multiplied":
        """Return a view of the same files that is counted as what it reads: with whole matrices."""
        view = copy.copy(self)
        view.stated = None
        return view

    def without_values(self) -> "Multiplied":
        """Return a view of the same files whose tensors have a dtype and a shape only (torch's meta device)."""
        return self._reading(self._source.without_values())

    def logging(self) -> "Multiplied":
        """Return a view of the same files that hashes every tensor of them which is read."""
        return self._reading(self._source.logging())

    def _reading(self, source: Checkpoint) -> "Multiplied":
        view = copy.copy(self)
        view._source, view.has_values, view.log = source, source.has_values, source.log
        return view

    def log_all(self) -> None:
        """Hash every tensor of the files that was not read yet. Raises as `ReadLog.note`."""
        self._source.log_all()

    def content_hash(self) -> str:
        """Return the hash of the files' tensors, as `Checkpoint.content_hash`."""
        return self._source.content_hash()

    def read(self, names: Iterable[str], into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the named tensors; `into` and errors as in `Checkpoint.read`."""
        tensors, places = {}, {} if into is None else into
        for name in names:
            stored = self.stored(name)
            if stored in self._products:
                whole = self._whole(stored)
                tensors[name] = places[name].copy_(whole) if name in places else whole
                continue
            file = self._names.get(stored, stored)  # of an unknown one the source tells
            tensors |= {name: self._source.read([file], {file: places[name]} if name in places else None)[file]}
        return tensors

    def _whole(self, name: str) -> torch.Tensor:
        """Return a matrix of low rank, multiplied out part by part."""
        parts, source = self._products[name], self._source
        dtype = DTYPES[source.dtypes[parts[0].columns]]
        whole = torch.empty(self._size(parts), dtype=dtype, device="cpu" if self.has_values else "meta")
        for part, place in zip(parts, whole.split([source.shapes[part.columns][0] for part in parts]), strict=True):
            read = source.read(part.names)
            if not part.others:
                place.copy_(read[part.columns])
            elif self.has_values:
                self._multiply(part, read, place)
        return whole

    def _multiply(self, part: LowRank, read: Mapping[str, torch.Tensor], place: torch.Tensor) -> None:
        """Write the rows that a part stands for. Raises `CheckpointError` for an order that does not list all."""
        columns, others, order = (read[name] for name in part.names)
        rank, width = columns.shape[1], place.shape[1]
        if others.shape != (width - rank, rank) or not torch.equal(order.sort().values, torch.arange(width)):
            raise CheckpointError(
                f"{part.order} in {self.folder} does not list every column once; give an undamaged checkpoint."
            )
        place[:, order[:rank]] = columns
        factor = others.double().T
        for rows, to in zip(columns.split(PANEL_ROWS), place.split(PANEL_ROWS), strict=True):
            to[:, order[rank:]] = (rows.double() @ factor).to(place.dtype)

    @property
    def beside_bytes(self) -> int:
        """Return what a matrix takes beside itself while it is multiplied out, at most: factors and a panel of rows."""
        return max(
            (self._bytes_beside(part) for parts in self._products.values() for part in parts if part.others), default=0
        )

    def _bytes_beside(self, part: LowRank) -> int:
        shapes, dtypes = self._source.shapes, self._source.dtypes
        copied = sum(math.prod(shapes[name]) * ITEM_BYTES[dtypes[name]] for name in part.names)
        width = shapes[part.order][0]
        in_float64 = math.prod(shapes[part.others]) + 2 * PANEL_ROWS * width
        return 2 * copied + ITEM_BYTES["F64"] * in_float64  # the copies, and the pages that they are copied from

    def read_rows(self, name: str, rows: slice) -> torch.Tensor:
        """Return a copy of some rows of a tensor."""
        stored = self.stored(name)
        return (
            self._whole(stored)[rows] if stored in self._products else self._source.read_rows(self._names[stored], rows)
        )

    def read_panels(self, name: str, panels: Iterable[slice]) -> Iterator[torch.Tensor]:
        """Yield copies of panels of a tensor's rows."""
        stored = self.stored(name)
        if stored not in self._products:
            yield from self._source.read_panels(self._names[stored], panels)
            return
        whole = self._whole(stored)
        yield from (whole[rows] for rows in panels)

    def map_one(self, name: str) -> torch.Tensor:
        """Return one tensor in the mapped file; a copy of a matrix that is multiplied out."""
        stored = self.stored(name)
        return self._whole(stored) if stored in self._products else self._source.map_one(self._names[stored])

    def read_some(self, name: str, rows: torch.Tensor, columns: slice = slice(None)) -> torch.Tensor:
        """Return a copy of some columns of rows in any order; `rows`: int64, on the host."""
        stored = self.stored(name)
        if stored in self._products:
            return self._whole(stored)[rows, columns]
        return self._source.read_some(self._names[stored], rows, columns)
