"""Sizes of one layer, and of a range of the vocabulary; in a per-layer checkpoint every layer has its own."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from oneshot.architecture.axes import shapes_of
from oneshot.architecture.expert_sizes import ExpertSizes
from oneshot.architecture.latent import LatentSizes

# linears that may have low rank: of queries and keys together, of attention's output, gate and up of an FFN
RankedKind = Literal["query_key", "output", "gate", "up"]
RANKED_KINDS: tuple[RankedKind, ...] = get_args(RankedKind)
# of the vocabulary; names of fields of plans and shapes, of damages, and in tensors of profiles
Table = Literal["embedding", "output_head"]
TABLES: tuple[Table, ...] = get_args(Table)


@dataclass(frozen=True)
class LayerShape:
    """State the sizes of one layer; in a per-layer checkpoint every layer has its own.

    The residual stream has `hidden_size` coordinates at attention, `middle_size` at the FFN and `output_size` after
    it. A *shortcut* matrix carries the stream between two different subspaces. `query_key_size` and `value_size` are
    per head. `rotary_selected`: the layer stores which rotary pairs each KV group keeps.

    `attention_bias`, `output_bias` and `mlp_bias` say which linears store a bias: q/k/v, o, and the FFN's. `norm_bias`:
    the norms store a bias. `query_key_norms`: queries and keys are normed, each by the weights of one head for all
    heads, or with `norms_all_heads` all heads together. `norms_per_sublayer`: a second norm follows the mixer.
    `shared_norm`: all sublayers read one norm.
    `gated`: the FFN has a gate beside its up projection. `norm_weights`: norms have a weight for every coordinate.
    `query_key_rank` (of both linears together), `output_rank`, `gate_rank`, `up_rank`: of linears with low rank; 0 for
    whole ones. Such a linear stores `rank` of its columns, a matrix that reconstructs the others, and their order.
    `cross_attention`: the layer also has attention over the encoder's output, of the same sizes. `num_buckets`: rows of
    a stored table of relative positions, with a column for every head. `experts`: the FFN is a mixture, and its width
    is one expert's; None for one FFN. `latent`: what keys and values come from; None for linears of their own.
    `sinks`: attention has a number for every head. `carried`: parameters of a mixer in the place of attention that
    stays as it is, with its norm; its heads are those whose keys and values it keeps, if any.

    A layer without heads has no attention, and one of FFN width zero no FFN: also no norm before it and no biases.
    """

    hidden_size: int
    middle_size: int
    output_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    query_key_size: int
    value_size: int
    attention_shortcut: bool = False
    ffn_shortcut: bool = False
    rotary_selected: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    query_key_norms: bool = False
    norms_all_heads: bool = False
    norms_per_sublayer: int = 1
    shared_norm: bool = False
    gated: bool = True
    norm_weights: bool = True
    cross_attention: bool = False
    num_buckets: int = 0
    query_key_rank: int = 0
    output_rank: int = 0
    gate_rank: int = 0
    up_rank: int = 0
    experts: ExpertSizes | None = None
    latent: LatentSizes | None = None
    sinks: bool = False
    carried: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the axes of its tensors (`axes`)."""
        sizes = {
            "stream": self.hidden_size,
            "neurons": self.intermediate_size,
            "heads": self.num_attention_heads,
            "groups": self.num_key_value_heads,
            "key": self.query_key_size,
            "value": self.value_size,
            "buckets": self.num_buckets,
        }
        if self.experts is not None:
            sizes |= {"experts": self.experts.count, "shared": self.experts.shared(self.intermediate_size)}
        return sizes if self.latent is None else sizes | self.latent.sizes(self.value_size)

    def linear_parameters(self) -> int:
        """Return the stored parameters of the layer's linears, shortcuts included."""
        mlp, experts, sizes = self._ffn_parameters(), self.experts, (self.middle_size, self.intermediate_size)
        return self._other_linears() + (mlp if experts is None else experts.parameters(mlp, *sizes))

    def active_parameters(self) -> int:
        """Return the parameters of the linears that one token passes; of experts only the ones that it is sent to."""
        mlp, experts, sizes = self._ffn_parameters(), self.experts, (self.middle_size, self.intermediate_size)
        return self._other_linears() + (mlp if experts is None else experts.active_parameters(mlp, *sizes))

    def _other_linears(self) -> int:
        """Return the stored parameters of attention's linears and of shortcuts; with a latent also of its norms."""
        if self.carried:
            return self.carried
        if self.latent is not None:
            axes = self.latent.axes("", biased=self.attention_bias)
            return sum(map(math.prod, shapes_of(axes, self.sizes).values()))
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        scores, values = (heads + groups) * self.query_key_size, groups * self.value_size
        attention = _of_rank(scores, self.hidden_size, self.query_key_rank) + values * self.hidden_size
        attention += (scores + values) * self.attention_bias + self.middle_size * self.output_bias * (heads > 0)
        attention += _of_rank(self.middle_size, heads * self.value_size, self.output_rank)
        shortcuts = self.attention_shortcut * self.hidden_size * self.middle_size
        shortcuts += self.ffn_shortcut * self.middle_size * self.output_size
        return (1 + self.cross_attention) * attention + shortcuts

    def _ffn_parameters(self) -> int:
        """Return the stored parameters of one FFN's linears."""
        width = self.intermediate_size
        bias = self.mlp_bias * (width > 0)
        mlp = _of_rank(width, self.middle_size, self.up_rank) + self.output_size * (width + bias) + width * bias
        if self.gated:
            mlp += _of_rank(width, self.middle_size, self.gate_rank) + width * bias
        return mlp

    def parameters(self) -> int:
        """Return the stored parameters, norms included."""
        return self._parameters

    @cached_property
    def _parameters(self) -> int:
        """Return the same: a planner asks layers that many plans share."""
        attends, has_ffn = self.num_attention_heads > 0 and not self.carried, self.intermediate_size > 0
        widths = self.hidden_size * (1 + self.cross_attention) * attends + self.middle_size * has_ffn
        widths = self.hidden_size if self.shared_norm else widths
        norms = widths * (self.norm_weights + self.norm_bias) * self.norms_per_sublayer
        norms += (self.num_buckets + self.sinks) * self.num_attention_heads
        normed_heads = (self.num_attention_heads + self.num_key_value_heads) if self.norms_all_heads else 2
        norms += normed_heads * self.query_key_size * self.query_key_norms * attends
        return self.linear_parameters() + norms + self.indices()

    def indices(self) -> int:
        """Return how many of the stored parameters are indices, int64: orders of columns, and rotary pairs."""
        orders = self.rotary_selected * self.num_key_value_heads * self.query_key_size // 2
        orders += (self.query_key_rank > 0) * self.hidden_size
        orders += (self.output_rank > 0) * self.num_attention_heads * self.value_size
        return orders + ((self.gate_rank > 0) + (self.up_rank > 0)) * self.middle_size

    def key_value_size(self) -> int:
        """Return the values that one token takes in the layer's KV cache, and one of the source in cross-attention."""
        if self.latent is not None:
            return self.latent.cached
        return (1 + self.cross_attention) * self.num_key_value_heads * (self.query_key_size + self.value_size)


def _of_rank(rows: int, columns: int, rank: int) -> int:
    """Return the numbers of a linear of this rank; 0 for a whole one."""
    return rank * (rows + columns - rank) if rank else rows * columns


@dataclass(frozen=True)
class TableShape:
    """State the rows and the rank of a range of the vocabulary.

    Below the full width the table has the range's rows at `rank` of the coordinates. A matrix makes the others of them.
    The coordinates' numbers are also stored, and the place of every row.
    """

    rows: int
    rank: int

    def parameters(self, width: int) -> int:
        """Return the stored parameters of the range of an embedding of this width."""
        return self.rows * self.rank + self.map_parameters(width) + self.indices(width)

    def indices(self, width: int) -> int:
        """Return how many of the parameters are indices, int64."""
        return self.rows + width * (self.rank < width)

    def products(self, width: int) -> int:
        """Return the products of one state with all rows, as an output head has them."""
        return self.map_parameters(width) + self.rows * self.rank

    def map_parameters(self, width: int) -> int:
        """Return the parameters of the matrix, which every token passes."""
        return (width - self.rank) * self.rank


def table_shapes(stated: Iterable[Mapping[str, int]]) -> tuple[TableShape, ...]:
    """Return the inverse of `dataclasses.asdict` of each range of a table, also after JSON."""
    return tuple(TableShape(**table) for table in stated)
