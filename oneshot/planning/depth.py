"""Whole layers for a budget."""

from collections.abc import Callable
from dataclasses import replace

import torch

from oneshot.errors import PlanError
from oneshot.planning.budget import Budget
from oneshot.planning.damages import Damages, predicted_damage
from oneshot.planning.grid import Grid
from oneshot.planning.plan import LEFT_OUT, Plan


def with_fewer_layers(
    grid: Grid,
    plan: Plan,
    budget: Budget,
    damages: Damages | None,
    meet_budget: Callable[[Plan], Plan] | None,
) -> Plan:
    """Return the plan of least predicted damage among those without one layer, without two, and so on.

    Layers go in the order of their own damage, the last layers first if damages are unknown. `meet_budget` shrinks the
    remaining layers to the budget; without it, the number of layers that comes nearest to the budget is taken.
    The last plan is the first one that is below the budget by its layers alone: fewer only do more damage.
    Without damages layers go only if nothing else reaches the budget. One layer with attention stays.
    """
    known = torch.arange(grid.shape.num_hidden_layers, 0, -1) if damages is None else damages.layers
    fewer, left = [plan], set(range(len(known)))
    attending = {layer for layer in left if grid.family.attends(layer)}
    for layer in known.argsort().tolist():
        if left & attending == {layer} or len(left) == 1:  # caches of hybrids ask attention how long the text is
            continue
        left.remove(layer)
        layers = list(fewer[-1].layers)
        layers[layer] = LEFT_OUT
        fewer.append(replace(plan, layers=tuple(layers)))
    measures = [budget.measure(grid.stack(option)) for option in fewer]
    if meet_budget is None:
        nearest = budget.choose(fewer, measures)
        if nearest == fewer[-1] and measures[-1] > budget.target:
            raise PlanError(
                f"The target is {budget.show(budget.target)}, but one layer alone has {budget.show(measures[-1])}; ask "
                "for a smaller --sparsity."
            )
        return nearest
    plans: list[Plan] = []
    refusal: PlanError | None = None
    for option, measure in zip(fewer, measures, strict=True):
        if plans and damages is None:
            break
        if measure < budget.target:
            plans.append(option)
            break
        try:
            plans.append(meet_budget(option))
        except PlanError as error:
            refusal = error  # the last one is of the fewest layers
    if damages is not None and plans:
        return min(plans, key=lambda plan: predicted_damage(plan, grid.shape, damages))
    if plans:
        return plans[0]
    assert refusal is not None
    raise refusal
