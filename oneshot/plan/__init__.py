"""Budget -> Plan: the kept sizes that reach a number of stored parameters, within what the tier can hold.

`sizes` is where it begins; `hidden_size`, `blocks`, `vocabulary` and `depth` plan one kind each, by what `damages` says
it costs.
"""

from oneshot.plan.blocks import make_plan
from oneshot.plan.budget import Budget, default_round_to, wanted_parameters
from oneshot.plan.damages import Damages, predicted_damage, profiled_damages
from oneshot.plan.hidden_size import groups_of_positions, spread_hidden_sizes
from oneshot.plan.sizes import head_unit, plan_sizes, predicted_divergences
from oneshot.plan.vocabulary import smaller_tables, vocabulary_ranges

__all__ = [
    "Budget",
    "Damages",
    "default_round_to",
    "groups_of_positions",
    "head_unit",
    "make_plan",
    "plan_sizes",
    "predicted_damage",
    "predicted_divergences",
    "profiled_damages",
    "smaller_tables",
    "spread_hidden_sizes",
    "vocabulary_ranges",
    "wanted_parameters",
]
