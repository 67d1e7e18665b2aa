"""The number of experts that every layer of a mixture keeps."""

from oneshot.config import Target
from oneshot.errors import ConfigError, PlanError
from oneshot.planning.budget import Budget
from oneshot.planning.grid import Grid
from oneshot.planning.plan import Plan
from oneshot.recipes import Method

LARGEST_STEP = 8  # so that experts can be shared among devices
STEPS = 16  # of a model's experts, at least


def with_experts(grid: Grid, plan: Plan, method: Method, target: Target, budget: Budget) -> Plan:
    """Return the plan with the experts that the target states, or with those whose model comes nearest to the budget.

    The plan is unchanged if experts stay.

    Raises `ConfigError` if neurons or heads also go and the number is not stated, `PlanError` for a number that is out
    of reach.
    """
    experts, stated = grid.shape.experts, target.num_experts
    if not method.reduces_experts:
        if stated is not None:
            raise ConfigError(f"--set num_experts={stated} needs a selector of experts; add --set experts=effects.")
        return plan
    assert experts is not None
    if stated is not None:
        if not experts.per_token <= stated <= experts.count:
            raise PlanError(
                f"--set num_experts={stated} is not between the {experts.per_token} experts of a token and the model's "
                f"{experts.count}."
            )
        return plan.with_sizes(num_experts=stated)
    if budget.measure(grid.stack(plan)) <= budget.target:
        return plan
    if method.reduces_sublayers:
        raise ConfigError(
            "Give --set num_experts= if neurons or heads also go, which take what is left; or set ffn=none, heads=none."
        )
    step = min(LARGEST_STEP, max(1, experts.count // STEPS))
    counts = range(experts.count, experts.per_token - 1, -step)
    measures = {count: budget.measure(grid.stack(plan.with_sizes(num_experts=count))) for count in counts}
    least = min(measures.values())
    if budget.target < least:
        raise PlanError(
            f"The target is {budget.show(budget.target)}, but removing experts gets down to {budget.show(least)} at "
            "best; ask for a smaller --sparsity."
        )
    return plan.with_sizes(num_experts=min(measures, key=lambda count: abs(measures[count] - budget.target)))
