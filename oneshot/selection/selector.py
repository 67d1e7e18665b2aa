"""The interface of selectors: their needs, their choices of neurons and heads, and the costs of these."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from oneshot.method import Pivoting
from oneshot.selection.evidence import Evidence

DOUBLE = 8  # bytes

Need = Literal["gram", "moments", "producers"]
"""A field of `Evidence`: the Gram of the columns, their moments, the energy of the rows that make them."""


@dataclass(frozen=True)
class Blocks:
    """Equal, neighbouring blocks of columns that stay or go whole.

    Attributes:
        count: blocks. num_classes: classes of equally many neighbouring blocks.
        quota: blocks of every class that stay.
    """

    count: int
    num_classes: int
    quota: int

    def class_of(self, device: torch.device) -> torch.Tensor:
        """Return the class of every block, int64 `(count,)`."""
        return torch.arange(self.count, device=device) // (self.count // self.num_classes)


@dataclass(frozen=True)
class Extent:
    """The sizes of a choice of neurons, for its cost; means over layers need not be whole.

    Attributes:
        columns, kept: inputs of the reading linear, all and kept. outputs: its outputs.
        pivoting: as in `Evidence`. sketch_rows: rows of the sketch that replaces the Gram; 0 without one.
        weighs_output: whether output curvature weighs neurons. on_cuda: whether a CUDA device computes.
    """

    columns: int
    kept: float
    outputs: int
    pivoting: Pivoting = "cholesky"
    sketch_rows: int = 0
    weighs_output: bool = False
    on_cuda: bool = False


@dataclass(frozen=True)
class Cost:
    """The cost of a choice of neurons.

    Attributes:
        bytes: working memory beside the evidence. knobs: options that lower it.
        gram_pivots, sketch_pivots: pivots that are taken one after the other, of the Gram or of a sketch.
        operations: all other operations, in float64.
    """

    bytes: float
    knobs: tuple[str, ...] = ()
    gram_pivots: float = 0.0
    sketch_pivots: float = 0.0
    operations: float = 0.0


class Selector(ABC):
    """A selector of FFN neurons and attention heads: pure functions of tensors.

    `needs`: the evidence without which it cannot choose. `takes_sketch`: whether a sketch may replace the Gram.
    `shares_layers`: whether layers can share a choice, because what several layers lose is the sum of what each loses.
    """

    needs: frozenset[Need] = frozenset({"gram"})
    takes_sketch = False
    shares_layers = True

    @abstractmethod
    def neurons(self, evidence: Evidence, kept: int) -> torch.Tensor:
        """Return the columns to keep, ascending int64 `(kept,)`."""

    def neurons_of_experts(self, evidence: Sequence[Evidence], kept: int) -> torch.Tensor:
        """Return the columns to keep of every expert, ascending int64 `(E, kept)`."""
        return torch.stack([self.neurons(one, kept) for one in evidence])

    @abstractmethod
    def blocks(self, evidence: Evidence, blocks: Blocks) -> torch.Tensor:
        """Return the blocks of columns to keep, ascending int64 `(quota · classes,)`."""

    def shared(self, evidence: Evidence) -> torch.Tensor:
        """Return what `blocks_of_shared` chooses by, to be summed over layers."""
        raise NotImplementedError

    def blocks_of_shared(self, total: torch.Tensor, count: int, kept: int) -> torch.Tensor:
        """Return the blocks of `count` to keep, ascending int64 `(kept,)`, by sums of `shared` over layers."""
        raise NotImplementedError

    @abstractmethod
    def cost(self, extent: Extent) -> Cost:
        """Return what a choice of neurons costs."""
