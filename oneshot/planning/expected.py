"""The loss to expect of a size where no profile predicts it: fits to sizes that were measured (docs/guides/form.md)."""

import math

from oneshot.architecture import ModelShape
from oneshot.planning.plan import Plan

MANY_NEURONS = 0.5  # the share of FFN neurons beyond which equal layers are warned of
NATS_OF_NEURONS = 1.6  # for all of them, in equal layers: 1.2 to 1.9 in three models
MEASURED_SHARE = 0.3  # of the parameters, up to which the per-layer form was measured
NATS_OF_PARAMETERS = 7.0  # for the square of their removed share, in the per-layer form: 1.8 to 7.3


def removed_neurons(plan: Plan, shape: ModelShape) -> float:
    """Return the share of all FFN neurons that a plan removes; 0 if the model has none."""
    dense = sum(shape.of(layer).intermediate_size for layer in range(len(plan.layers)))
    return 1 - sum(kept.intermediate_size for kept in plan.layers) / dense if dense else 0.0


def expected_of_equal_layers(neurons: float) -> float:
    """Return the perplexity ÷ the dense model's to expect of equal layers without this share of FFN neurons."""
    return math.exp(NATS_OF_NEURONS * neurons)


def expected_of_own_sizes(share: float) -> float:
    """Return at most what to expect of the per-layer form without so much of the parameters, up to `MEASURED_SHARE`."""
    return math.exp(NATS_OF_PARAMETERS * share**2)
