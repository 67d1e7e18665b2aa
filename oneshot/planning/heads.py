"""The numbers of heads that layers can keep."""

from dataclasses import replace
from typing import Any

from oneshot.architecture import ModelShape
from oneshot.planning.plan import Plan

Sizes = dict[str, Any]  # fields of `LayerPlan`


def head_sizes(shape: ModelShape, head_unit: str) -> list[Sizes]:
    """Return the heads for every number of kept units, from one to all."""
    groups, per_group = shape.num_key_value_heads, shape.heads_per_group
    if head_unit == "kv-group":
        kept = [(units * per_group, units) for units in range(1, groups + 1)]
    else:
        kept = [(units * groups, groups) for units in range(1, per_group + 1)]
    return [{"num_attention_heads": heads, "num_key_value_heads": left} for heads, left in kept]


def head_options(shape: ModelShape, plan: Plan) -> list[Plan]:
    """Return the plans with one head unit in every layer, with two, up to all; a layer with fewer keeps what it has."""
    sizes = [head_sizes(shape.of(number), plan.head_unit) for number in range(len(plan.layers))]

    def with_units(units: int) -> Plan:
        layers = tuple(
            kept if kept.is_left_out else replace(kept, **own[min(units, len(own)) - 1])
            for kept, own in zip(plan.layers, sizes, strict=True)
        )
        return replace(plan, layers=layers)

    return [with_units(units) for units in range(1, max(map(len, sizes)) + 1)]
