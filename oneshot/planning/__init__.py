"""From a target to a plan: the kept sizes, within what the form of the result can state. No weights, no text.

`sizes.make_plan` is the entry. Its steps are in `sizes.planned`: sizes that are `stated`, sizes that all layers share
(`equal_sizes`, `hidden_size`), and each layer's `own_sizes`, by the `damages` that a profile predicts.
"""

from oneshot.planning.budget import Budget, default_round_to, missed_target
from oneshot.planning.curves import Profile, ProfileOrigin
from oneshot.planning.damages import Damages, predicted_damage, profiled_damages
from oneshot.planning.grid import Grid
from oneshot.planning.groups import quantiser_groups
from oneshot.planning.hidden_size import groups_of_positions, spread_hidden_sizes
from oneshot.planning.kept import find_kept
from oneshot.planning.mixture import MixtureVerdict, mixture_verdict
from oneshot.planning.options import expert_counts
from oneshot.planning.plan import LEFT_OUT, HiddenPlan, LayerPlan, Plan, dense_plan, removed_unit
from oneshot.planning.predicted import (
    LEAST_SHARE,
    MANY_NEURONS,
    MEASURED_SHARE,
    beside_rounding,
    expected_of_equal_layers,
    expected_of_own_sizes,
    predicted_curve,
    predicted_divergences,
    removed_neurons,
    with_share,
    within_loss,
)
from oneshot.planning.problem import Problem
from oneshot.planning.serving import GROUPS_OF, with_groups
from oneshot.planning.sizes import least_share, make_plan, parameter_budget, reduced
from oneshot.planning.stated import with_steps
from oneshot.planning.unsupported import errors_against, reason_against_own_sizes, refuse_idle
from oneshot.planning.vocabulary import smaller_tables, vocabulary_ranges
