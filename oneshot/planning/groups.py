"""Which groups of weights quantisers can take: a group must divide the inputs of every linear."""

from dataclasses import dataclass, replace
from math import gcd

from oneshot.architecture import RANKED_KINDS
from oneshot.config import Target
from oneshot.method import Method
from oneshot.planning.budget import width_step
from oneshot.planning.grid import Grid
from oneshot.planning.options import head_sizes, inner_sizes, rank_options
from oneshot.planning.plan import Plan
from oneshot.planning.serving import inputs_of

GROUPS = (32, 64, 128)  # of the kernels of quantisers


@dataclass(frozen=True)
class Groups:
    """State the greatest divisor of the inputs of all linears in the layers, and the one that --round-to can reach."""

    kept: int
    possible: int

    def __str__(self) -> str:
        fitting = [str(group) for group in GROUPS if self.kept % group == 0]
        more = [str(group) for group in GROUPS if self.possible % group == 0 and self.kept % group]
        found = " and ".join(fitting) or f"none of {', '.join(map(str, GROUPS))}"
        return f"{found}; --round-to {more[-1]} for {' and '.join(more)}" if more else found


def quantiser_groups(grid: Grid, method: Method, plan: Plan, target: Target, *, by_profile: bool) -> Groups:
    """Return what divides the inputs of linears in a plan, or in all that a profile may make of it.

    `method`: settled for the grid.
    """
    shape = grid.shape
    whole = plan if target.states_hidden_size else replace(plan, hidden=None)
    if target.intermediate_size is None and not target.inner_rate:
        layers = (  # with their whole FFNs, if they stay
            one if one.is_left_out else replace(one, intermediate_size=shape.of(at).intermediate_size)
            for at, one in enumerate(whole.layers)
        )
        whole = replace(whole, layers=tuple(layers))
    stepped, fixed = (
        {
            size
            for at, layer in zip(plan.kept_layers, grid.stack(one).layers, strict=True)
            for size in (*inputs_of(shape, at, layer, "attention"), *inputs_of(shape, at, layer, "ffn"))
        }
        for one in (plan, whole)
    )
    if by_profile:
        sizes = {one["value_size"] for one in inner_sizes(grid)} if method.plans_inner_sizes else {None}
        values = {size or shape.head_dim for size in sizes}
        for own in shape.distinct:
            heads = head_sizes(own, plan.head_unit) if method.reduces_heads else []
            counts = {some["num_attention_heads"] for some in heads} or {own.num_attention_heads}
            fixed |= {count * size for count in counts for size in values}
            for kind in RANKED_KINDS if method.plans_ranks else ():
                stepped |= set(rank_options(own, kind, target.round_to))
        if method.reduces_ffn:
            stepped.add(width_step(shape, target.round_to))
        stepped |= fixed
    allowed = [{size for size in sizes if size % grid.serving.group == 0} for sizes in (stepped, fixed)]
    return Groups(*(gcd(*sizes) for sizes in allowed))
