"""FFN neurons and heads for a budget: equal layers, or each layer's own sizes if damages are known."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from oneshot.architecture import RankedKind
from oneshot.errors import PlanError
from oneshot.planning.budget import Budget, OutOfReachError, width_step
from oneshot.planning.damages import Damages, predicted_damage
from oneshot.planning.grid import Grid
from oneshot.planning.heads import head_options
from oneshot.planning.own_sizes import spread, spread_with_equal_heads, worth_trying
from oneshot.planning.plan import Plan
from oneshot.planning.vocabulary import equal_tables


def meet_budget(
    grid: Grid,
    plan: Plan,
    budget: Budget,
    *,
    reduce_ffn: bool,
    reduce_heads: bool,
    round_to: int | None,
    damages: Damages | None = None,
    reduce_embedding: bool = False,
    leave_out_sublayers: bool = False,
    reduce_inner: bool = False,
    ranked_kinds: Sequence[RankedKind] = (),
    reduce_experts: bool = False,
) -> Plan:
    """Return the plan with fewer neurons and heads that meets the budget; FFN widths are multiples of `round_to`.

    Without `damages` all layers are equal and come as near to the budget as possible. If both kinds are reduced, heads
    take the fraction nearest to the one that all sublayers must lose, and the FFN takes what is left. With `damages`
    the plan of least damage within the budget is chosen, among equal layers unless the form lets layers differ.
    `reduce_embedding`: ranks of the vocabulary's ranges are chosen together with these sizes; without damages they are
    equal, and the smallest FFN comes first. `leave_out_sublayers`: with damages, the sizes zero of an FFN and of
    attention also count. `reduce_inner`: with damages, each layer's sizes inside heads are also chosen if the form lets
    them differ. `ranked_kinds`: with damages, each layer's ranks of these linears are also chosen. `reduce_experts`:
    with damages, each layer's number of experts is also chosen.

    Args:
        plan: what is decided already, with all neurons and heads.

    Raises `PlanError` if nothing may be reduced or the budget is out of reach.
    """
    shape = grid.shape
    surplus = budget.measure(grid.stack(plan)) - budget.target
    if surplus == 0:
        return plan
    leaves_out = leave_out_sublayers and damages is not None
    if not (reduce_ffn or reduce_heads or reduce_experts or leaves_out):
        module = grid.family.stack.feed_forward.out.rpartition(".")[0]
        ranks = f", or to reduce ranks beside whole FFNs, write --keep '*.{module}.*' in place of ffn=none"
        raise PlanError(
            "Nothing may be reduced (ffn=none, heads=none); allow one, such as --set ffn=id, or ask for --sparsity 0"
            f"{ranks if grid.has_ranks and module else ''}."
        )
    step = width_step(shape, round_to)
    if reduce_ffn and step > shape.intermediate_size:
        grid.refuse_step(step, "FFN width", shape.intermediate_size)
    if reduce_ffn and step % shape.width_step:
        raise PlanError(
            f"--round-to {step} is not a multiple of {shape.width_step}, as FFN widths of this model are; give one."
        )
    if damages is not None and grid.layers_differ:
        ffn_step = step if reduce_ffn else None
        if reduce_heads and not grid.heads_differ:
            return spread_with_equal_heads(grid, plan, budget, damages, ffn_step, leaves_out=leaves_out)
        return spread(
            grid,
            plan,
            budget,
            damages,
            ffn_step,
            reduce_heads=reduce_heads,
            leaves_out=leaves_out,
            reduce_embedding=reduce_embedding,
            reduce_inner=reduce_inner and grid.inner_sizes_differ,
            ranked_kinds=ranked_kinds if grid.has_ranks and len(damages.ranks) else (),
            round_ranks_to=round_to,
            reduce_experts=reduce_experts,
        )
    if not reduce_heads:
        return _with_width(grid, plan, budget, step, reduce_heads=False, reduce_embedding=reduce_embedding)
    options = [grid.kept.restored(option, plan) for option in head_options(shape, plan)]
    options = grid.servable(options, "attention")
    if not reduce_ffn:
        return _nearest_heads(grid, plan, options, budget, surplus)
    if damages is not None:
        return _least_damage(grid, options, budget, damages, step)
    fraction = surplus / sum(layer.parameters() for layer in grid.stack(plan).layers)
    kept = max(1, len(options) - round(fraction * len(options)))
    # one head may be more than is asked for if attention outweighs the FFN; all heads remove nothing
    fitting = (option for option in options[kept - 1 :] if budget.measure(grid.stack(option)) >= budget.target)
    return _with_width(grid, next(fitting, options[-1]), budget, step, reduce_embedding=reduce_embedding)


def _nearest_heads(grid: Grid, plan: Plan, options: list[Plan], budget: Budget, surplus: float) -> Plan:
    """Return the plan whose number of heads comes nearest to the budget."""
    most = budget.measure(grid.stack(plan)) - budget.measure(grid.stack(options[0]))
    if surplus > most:
        raise PlanError(
            f"Heads alone can give up {budget.show(most)} of the {budget.show(surplus)} asked for; "
            "ask for a smaller --sparsity."
        )
    return budget.choose(options, [budget.measure(grid.stack(option)) for option in options])


def _with_width(
    grid: Grid, plan: Plan, budget: Budget, step: int, *, reduce_heads: bool = True, reduce_embedding: bool = False
) -> Plan:
    """Return the plan whose equal FFN widths, multiples of `step`, come nearest to the budget.

    If the smallest width is not small enough and the embedding may be reduced, its ranges also get equal ranks.
    `reduce_heads`: whether the plan is one with fewer heads.
    """
    width = grid.shape.intermediate_size
    widths = [*range(step, width, step), width]
    options = [grid.kept.restored(plan.with_width(width), plan) for width in widths]
    options = grid.servable(options, "ffn")
    measures = [budget.measure(grid.stack(option)) for option in options]
    below = (measures[1] - measures[0]) / 2 if len(measures) > 1 and not budget.is_ceiling else 0.0
    lowest = measures[0] - below
    if budget.target < lowest and reduce_embedding:
        tables = equal_tables(grid.shape.vocab_size, grid.shape.hidden_size)
        options = [replace(options[0], embedding=ranges) for ranges in tables]
        measures = [budget.measure(grid.stack(option)) for option in options]
        lowest = measures[0]
    if budget.target < lowest:
        raise OutOfReachError(budget, measures[0])
    return budget.choose(options, measures)


def _least_damage(grid: Grid, options: list[Plan], budget: Budget, damages: Damages, step: int) -> Plan:
    """Return the plan of least damage among all numbers of heads, each with the FFN width that meets the budget."""
    fitting = []
    for option in worth_trying(grid, options, budget):
        with contextlib.suppress(PlanError):
            fitting.append(_with_width(grid, option, budget, step))
    if not fitting:
        raise PlanError(
            f"No FFN width and no number of heads reaches {budget.target:,.0f} {budget.unit}; ask for more."
        )
    return min(fitting, key=lambda plan: predicted_damage(plan, grid.shape, damages))
