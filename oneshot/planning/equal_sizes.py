"""Sizes that all layers share, and layers that go whole: the plans that differ in one such size."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from oneshot.errors import ConfigError
from oneshot.planning.budget import OutOfReachError
from oneshot.planning.options import expert_counts, head_sizes
from oneshot.planning.plan import LEFT_OUT, Plan
from oneshot.planning.problem import Problem, nearest
from oneshot.planning.vocabulary import equal_tables


def with_equal_experts(problem: Problem, plan: Plan) -> Plan:
    """Return the plan whose layers all keep as many experts as come nearest to the budget.

    Raises `ConfigError` if neurons or heads also go, which take what is left.
    """
    if problem.method.reduces_sublayers:
        raise ConfigError(
            "Give --set num_experts= if neurons or heads also go, which take what is left; or set ffn=none, heads=none."
        )
    experts = problem.grid.shape.experts
    assert experts is not None
    counts = expert_counts(experts, problem.grid.serving.tp)[::-1]
    options = [plan.with_sizes(num_experts=count) for count in counts]
    target, least = problem.show(options[-1])
    return nearest(problem, options, f"The target is {target}, but removing experts gets down to {least} at best")


def plans_without_layers(problem: Problem, plan: Plan) -> list[Plan]:
    """Return the plan, the one without one layer, without two, and so on.

    Layers go in the order of their own damage, the last layers first if damages are unknown. One layer with attention
    stays, and as many layers as a pipeline has stages.
    """
    grid, damages = problem.grid, problem.damages
    known = torch.arange(grid.shape.num_hidden_layers, 0, -1) if damages is None else damages["layers"]
    fewer, left = [plan], set(range(len(known)))
    attending = {layer for layer in left if grid.family.attends(layer)}
    for layer in known.argsort().tolist():
        is_needed = left & attending == {layer}  # caches of hybrids ask attention how long the text is
        if is_needed or len(left) == grid.serving.pp:
            continue
        left.remove(layer)
        layers = list(fewer[-1].layers)
        layers[layer] = LEFT_OUT
        fewer.append(replace(plan, layers=tuple(layers)))
    return fewer


def plans_with_equal_heads(problem: Problem, plan: Plan) -> list[Plan]:
    """Return the plans with one head unit in every layer, with two, up to all, that the form holds and can be served.

    A layer with fewer units keeps what it has.
    """
    grid, options = problem.grid, []
    sizes = [head_sizes(grid.shape.of(number), plan.head_unit) for number in range(len(plan.layers))]
    most = max(map(len, sizes))
    for units in range(1, most + 1):
        layers = list(plan.layers)
        changed = set(plan.kept_layers) - grid.kept.attention
        for number in changed:
            own = sizes[number]
            layers[number] = replace(layers[number], **own[min(units, len(own)) - 1])
        counts = {(layers[number].num_attention_heads, layers[number].num_key_value_heads) for number in changed}
        if units == most or all(grid.holds_heads(*count) for count in counts):
            options.append(replace(plan, layers=tuple(layers)))
    return grid.servable(options, "attention")


def plans_with_share_of_heads(problem: Problem, plan: Plan, options: Sequence[Plan]) -> list[Plan]:
    """Return the option that loses the fraction of heads nearest to the one that all sublayers of the plan must lose.

    Behind it are those with fewer heads, for FFNs that do not lose their fraction. `options`: by rising number of
    heads. One head may be more than is asked for if attention outweighs the FFN; all heads remove nothing.
    """
    stack, measure, target = problem.grid.stack(plan), problem.budget.measure, problem.budget.target
    total = measure(stack)
    of_layers = measure(replace(stack, layers=stack.layers * 2)) - total  # in the budget's unit
    kept = max(1, len(options) - round((total - target) / of_layers * len(options)))
    enough = [problem.measure(option) >= target for option in options]
    first = next((number for number in range(kept - 1, len(options)) if enough[number]), len(options) - 1)
    return [options[first], *(options[number] for number in range(first - 1, -1, -1) if enough[number])]


def with_equal_width(problem: Problem, plan: Plan) -> Plan:
    """Return the plan whose equal FFN widths come nearest to the budget.

    If the smallest width is not small enough and tables of the vocabulary may be reduced, their ranges also get equal
    ranks.
    Raises `OutOfReachError`.
    """
    grid, budget, step, width = problem.grid, problem.budget, problem.width_step, problem.grid.shape.intermediate_size
    widths = [*range(step, width, step), width]
    options = grid.servable([plan.with_width(width, but=grid.kept.ffn) for width in widths], "ffn")
    measures = [problem.measure(option) for option in options]
    half_step = (measures[1] - measures[0]) / 2 if len(measures) > 1 and not budget.is_ceiling else 0.0
    lowest = measures[0] - half_step
    if budget.target < lowest and problem.reduced_tables:
        tables: list[dict[str, Any]] = [
            dict.fromkeys(problem.reduced_tables, ranges)
            for ranges in equal_tables(grid.shape.vocab_size, grid.shape.hidden_size)
        ]
        options = [replace(options[0], **ranges) for ranges in tables]
        measures = [problem.measure(option) for option in options]
        lowest = measures[0]
    if budget.target < lowest:
        raise OutOfReachError(budget, measures[0])
    return budget.choose(options, measures)
