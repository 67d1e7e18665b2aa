"""Whole layers for a budget."""

from collections.abc import Callable
from dataclasses import replace

import torch

from oneshot.errors import PlanError
from oneshot.plan.budget import Budget
from oneshot.plan.damages import Damages, predicted_damage
from oneshot.records import LEFT_OUT, ModelShape, Plan


def with_fewer_layers(
    shape: ModelShape,
    plan: Plan,
    budget: Budget,
    damages: Damages | None,
    meet_budget: Callable[[Plan], Plan] | None,
) -> Plan:
    """The plan of least predicted damage among those without one layer, without two, and so on.

    Layers go in the order of what leaving out each alone costs, the last ones first where that is not known yet.
    `meet_budget` shrinks those that stay to the budget; without it the number of layers that comes nearest to it is
    taken. Without damages, before they are measured, layers go only where nothing else reaches the budget.
    """
    known = torch.arange(shape.num_hidden_layers, 0, -1) if damages is None else damages.layers
    fewer = [plan]
    for layer in known.argsort().tolist()[:-1]:
        layers = list(fewer[-1].layers)
        layers[layer] = LEFT_OUT
        fewer.append(replace(plan, layers=tuple(layers)))
    measured = [(option, budget.measure(option.stack(shape))) for option in fewer]
    if meet_budget is None:
        nearest, measure = min(measured, key=lambda pair: abs(pair[1] - budget.target))
        if nearest == fewer[-1] and measure > budget.target:
            raise PlanError(
                f"The target is {budget.show(budget.target)}, but one layer alone has {budget.show(measure)}; ask for "
                "a smaller --sparsity, or allow --ffn id as well."
            )
        return nearest
    plans: list[Plan] = []
    refusal: PlanError | None = None
    for option, measure in measured:
        if plans and (damages is None or measure < budget.target):
            break
        if measure < budget.target:  # layers more are too large at their narrowest
            return option
        try:
            plans.append(meet_budget(option))
        except PlanError as error:
            refusal = error  # at last that of the fewest layers
    if damages is not None and plans:
        return min(plans, key=lambda plan: predicted_damage(plan, shape, damages))
    if plans:
        return plans[0]
    assert refusal is not None
    raise refusal
