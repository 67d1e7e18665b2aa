"""The number of experts that the layers of a mixture keep."""

from oneshot.architecture import ExpertSizes
from oneshot.config import Target
from oneshot.errors import ConfigError, PlanError
from oneshot.method import Method
from oneshot.planning.budget import Budget
from oneshot.planning.damages import Damages
from oneshot.planning.grid import Grid
from oneshot.planning.plan import Plan

LARGEST_STEP = 8  # so that experts can be shared among devices
STEPS = 16  # of a model's experts, at least


def expert_counts(experts: ExpertSizes, tp: int = 1) -> list[int]:
    """Return the numbers of experts that a layer may keep, rising to all of them.

    `tp`: GPUs that may have whole experts; they share every number equally if they can share all experts so.
    """
    step = min(LARGEST_STEP, max(1, experts.count // STEPS))
    counts = range(experts.count, experts.per_token - 1, -step)
    return [count for count in counts if experts.count % tp or count % tp == 0][::-1]


def with_experts(
    grid: Grid, plan: Plan, method: Method, target: Target, budget: Budget, damages: Damages | None = None
) -> Plan:
    """Return the plan with the experts that the target states, or with those whose model comes nearest to the budget.

    All layers keep equally many. The plan is unchanged if experts stay, or if damages decide how many each layer keeps;
    before these are known, neurons and heads stand for the experts if they also go.

    Raises `ConfigError` if neurons or heads also go and the number is neither stated nor planned, `PlanError` for a
    number that is out of reach.
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
        if method.plans_experts:
            raise ConfigError(
                f"--set num_experts={stated} is for all layers, and expert_counts=sensitivity gives each its own; "
                "leave one out."
            )
        return plan.with_sizes(num_experts=stated)
    if method.plans_experts and (damages is not None or method.reduces_sublayers):
        return plan
    if budget.measure(grid.stack(plan)) <= budget.target:
        return plan
    if method.reduces_sublayers:
        raise ConfigError(
            "Give --set num_experts= if neurons or heads also go, which take what is left; or set ffn=none, heads=none."
        )
    counts = expert_counts(experts, grid.serving.tp)[::-1]
    measures = [budget.measure(grid.stack(plan.with_sizes(num_experts=count))) for count in counts]
    least = min(measures)
    if budget.target < least:
        raise PlanError(
            f"The target is {budget.show(budget.target)}, but removing experts gets down to {budget.show(least)} at "
            "best; ask for a smaller --sparsity."
        )
    return plan.with_sizes(num_experts=budget.choose(counts, measures))
