"""The kept sizes of a model."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from oneshot.architecture import RANKED_KINDS, TABLES, ModelShape, RankedKind, Table, TableShape, table_shapes
from oneshot.method import Method


@dataclass(frozen=True)
class HiddenPlan:
    """Widths of the residual stream at every position, and the positions that share a subspace.

    A position is the input of a sublayer, counted through the model; the last one is the input of the final norm.
    `group_of[p]` is the group of position `p`, and `sizes[p]` its group's width.
    """

    group_of: tuple[int, ...]
    sizes: tuple[int, ...]

    def changes_at(self, position: int) -> bool:
        """Return whether the stream enters another subspace at this position."""
        return position > 0 and self.group_of[position] != self.group_of[position - 1]

    @property
    def num_groups(self) -> int:
        return self.group_of[-1] + 1


@dataclass(frozen=True)
class LayerPlan:
    """The kept FFN width, heads and experts of one layer; zero if the FFN, attention or both are left out.

    `query_key_size` and `value_size` are kept per head; None for all. The ranks are of linears with low rank;
    None for whole ones.
    """

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    query_key_size: int | None = None
    value_size: int | None = None
    query_key_rank: int | None = None
    output_rank: int | None = None
    gate_rank: int | None = None
    up_rank: int | None = None
    num_experts: int | None = None

    @property
    def ranks(self) -> dict[RankedKind, int]:
        """Return the ranks of the linears that are not whole."""
        of_kinds = {kind: getattr(self, f"{kind}_rank") for kind in RANKED_KINDS}
        return {kind: rank for kind, rank in of_kinds.items() if rank is not None}

    @property
    def is_left_out(self) -> bool:
        return self == LEFT_OUT


LEFT_OUT = LayerPlan(0, 0, 0)

RemovedUnit = Literal["query-head", "kv-group"]


@dataclass(frozen=True)
class Plan:
    """The kept sizes of every layer of the dense model, and of what surrounds the layers.

    Attributes:
        layers: one entry for each dense layer.
        head_unit: what a removed head is: a whole KV group, or one query head of every group of a layer.
        hidden: None if the residual stream keeps its width.
        embedding: ranges of the vocabulary and their ranks; empty if the table stays whole. A tied head is this table.
        output_head: the same of an output head of its own.
    """

    layers: tuple[LayerPlan, ...]
    head_unit: RemovedUnit
    hidden: HiddenPlan | None = None
    embedding: tuple[TableShape, ...] = ()
    output_head: tuple[TableShape, ...] = ()

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Plan":
        """Return the inverse of `dataclasses.asdict`, also after JSON."""
        hidden = values["hidden"]
        if hidden is not None:
            hidden = HiddenPlan(**{name: tuple(value) for name, value in hidden.items()})
        layers = tuple(LayerPlan(**layer) for layer in values["layers"])
        tables: dict[str, Any] = {table: table_shapes(values[table]) for table in TABLES}
        return Plan(**{**values, **tables, "layers": layers, "hidden": hidden})

    @property
    def tables(self) -> dict[Table, tuple[TableShape, ...]]:
        """Return the ranges of the tables that have ranks."""
        of_tables: dict[Table, tuple[TableShape, ...]] = {"embedding": self.embedding, "output_head": self.output_head}
        return {name: ranges for name, ranges in of_tables.items() if ranges}

    @property
    def kept_layers(self) -> list[int]:
        """Return the layers that stay: the compressed model's layer i is the dense one's `kept_layers[i]`."""
        return [layer for layer, kept in enumerate(self.layers) if not kept.is_left_out]

    def with_sizes(self, **sizes: int) -> "Plan":
        """Return the plan with these sizes in every layer that stays."""
        return replace(self, layers=tuple(kept if kept.is_left_out else replace(kept, **sizes) for kept in self.layers))

    def with_width(self, width: int, but: Collection[int] = ()) -> "Plan":
        """Return the plan with FFNs of this width in all layers `but` these; a narrower one stays as it is."""
        layers = list(self.layers)
        for number in set(range(len(layers))) - set(but):
            layers[number] = replace(layers[number], intermediate_size=min(width, layers[number].intermediate_size))
        return replace(self, layers=tuple(layers))

    def shape_of_layer(self, shape: ModelShape, layer: int) -> ModelShape:
        """Return the shape with a layer's kept FFN width and heads, in the full coordinates."""
        kept, experts, shape = self.layers[layer], shape.experts, shape.of(layer)
        if experts is not None and kept.num_experts is not None:
            experts = replace(experts, count=kept.num_experts)
        return replace(
            shape,
            experts=experts,
            intermediate_size=kept.intermediate_size,
            num_attention_heads=kept.num_attention_heads,
            num_key_value_heads=kept.num_key_value_heads,
        )

    @property
    def reduces_queries_keys(self) -> bool:
        """Return whether queries and keys have fewer coordinates in any layer."""
        return any(layer.query_key_size is not None for layer in self.layers)

    @property
    def reduces_values(self) -> bool:
        """Return whether values have fewer coordinates in any layer."""
        return any(layer.value_size is not None for layer in self.layers)

    @property
    def has_ranks(self) -> bool:
        """Return whether a linear has low rank in any layer."""
        return any(layer.ranks for layer in self.layers)

    def removes_experts(self, shape: ModelShape) -> bool:
        """Return whether any layer loses whole experts."""
        counts = [layer.num_experts for layer in self.layers if layer.num_experts is not None]
        return shape.experts is not None and any(count < shape.experts.count for count in counts)

    def shrinks_layers(self, shape: ModelShape) -> bool:
        """Return whether any layer that stays loses neurons or heads."""
        return any(self.shape_of_layer(shape, layer) != shape.of(layer) for layer in self.kept_layers)

    def reduces_sublayers(self, shape: ModelShape) -> bool:
        """Return whether any layer loses neurons or heads, or is left out."""
        return len(self.kept_layers) < shape.num_hidden_layers or self.shrinks_layers(shape)


def dense_plan(
    shape: ModelShape, method: Method, query_key_size: int | None = None, value_size: int | None = None
) -> Plan:
    """Return the plan that keeps everything, but for these sizes inside heads."""

    def whole(layer: ModelShape) -> LayerPlan:
        heads, groups = layer.num_attention_heads, layer.num_key_value_heads
        return LayerPlan(layer.intermediate_size, heads, groups, query_key_size, value_size)

    layers = tuple(whole(shape.of(number)) for number in range(shape.num_hidden_layers))
    return Plan(layers, removed_unit(method, shape))


def removed_unit(method: Method, shape: ModelShape) -> RemovedUnit:
    """Return the head unit; `auto` selects the smaller one."""
    if method.head_unit != "auto":
        return method.head_unit
    return "query-head" if any(one.heads_per_group > 1 for one in shape.distinct) else "kv-group"
