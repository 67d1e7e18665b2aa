"""What a planner is asked, and the two ways to choose one of several whole plans."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from oneshot.architecture import Table
from oneshot.config import Target
from oneshot.errors import PlanError
from oneshot.method import Method
from oneshot.planning.budget import Budget, OutOfReachError, width_step
from oneshot.planning.damages import Damages, predicted_damage
from oneshot.planning.grid import Grid
from oneshot.planning.plan import Plan


@dataclass(frozen=True)
class Problem:
    """The sizes that are wanted of a model, and what they may be.

    Attributes:
        method: settled for the grid (`Grid.settle`). budget: what the target means in the unit of its measure.
        damages: the predicted losses of all sizes; None before a profile.
    """

    grid: Grid
    method: Method
    target: Target
    budget: Budget
    damages: Damages | None = None

    @property
    def layers_differ(self) -> bool:
        """Return whether every layer gets its own sizes: a profile says what they cost, and the form holds them."""
        return self.damages is not None and self.grid.layers_differ

    @property
    def leaves_out_sublayers(self) -> bool:
        """Return whether attention or the FFN of a layer may go by itself."""
        return self.damages is not None and self.method.leaves_out_sublayers

    @property
    def known_damages(self) -> Damages:
        """Return the predicted losses, which a profile must know."""
        assert self.damages is not None
        return self.damages

    @property
    def reduced_tables(self) -> list[Table]:
        """Return the tables whose ranges of the vocabulary may have ranks."""
        tables = self.grid.ranked_tables if self.method.embedding != "none" else []
        return [table for table in tables if table not in self.grid.kept.tables]

    @property
    def width_step(self) -> int:
        """Return the step between FFN widths."""
        return width_step(self.grid.shape, self.target.round_to)

    def measure(self, plan: Plan) -> float:
        """Return what the budget counts of a plan."""
        return self.budget.measure(self.grid.stack(plan))

    def show(self, *plans: Plan) -> list[str]:
        """Return the target and the measures of plans, each with its unit."""
        return [self.budget.show(amount) for amount in (self.budget.target, *map(self.measure, plans))]


def nearest(problem: Problem, options: Sequence[Plan], refusal: str) -> Plan:
    """Return the plan that comes nearest to the budget.

    Raises `PlanError`, which begins with the refusal, if even the smallest plan is above the budget.
    """
    measures = [problem.measure(option) for option in options]
    if problem.budget.target < min(measures):
        raise PlanError(f"{refusal}; ask for a smaller --sparsity.")
    return problem.budget.choose(options, measures)


def best_of(problem: Problem, options: Iterable[Plan], complete: Callable[[Plan], Plan]) -> Plan:
    """Complete every option and return the plan of least damage, or without damages the first one.

    Raises the `PlanError` of the option that gets down furthest if none can be completed, or else of the last one.
    """
    plans: list[Plan] = []
    refusals: list[PlanError] = []
    for option in options:
        if plans and problem.damages is None:
            break
        try:
            plans.append(complete(option))
        except PlanError as error:
            refusals.append(error)
    if not plans:
        raise min(refusals[::-1], key=lambda error: error.least if isinstance(error, OutOfReachError) else inf)
    damages = problem.damages
    return plans[0] if damages is None else min(plans, key=lambda plan: predicted_damage(plan, damages))
