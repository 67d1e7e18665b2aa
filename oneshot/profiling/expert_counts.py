"""What fewer experts cost in one layer of a mixture: their joint effects on its output, for every number that stays."""

import torch

from oneshot.compression.expert_scores import ExpertSums, removed_experts
from oneshot.families import ExpertSizes
from oneshot.planning import expert_counts
from oneshot.profiling.probes import PROBE_SHARE


def count_curve(sums: ExpertSums, experts: ExpertSizes) -> torch.Tensor:
    """Return what a layer loses with every number of experts, float64 `(E + 1,)`, as `Profile.expert_errors`.

    Sets are chosen, and their effects summed, for the numbers that a layer may keep. Between them the curve is a line.
    """
    effects, counts, lost = sums.effects.double().cpu(), expert_counts(experts), []
    for count in counts:
        gone = removed_experts("effects", sums, experts.count - count, torch.Generator())
        lost.append(float(effects[gone][:, gone].sum()))
    changes = torch.tensor(lost, dtype=torch.float64).flip(0).cummax(0).values.flip(0)  # sets are local optima
    changes = changes / changes[0].clamp_min(torch.finfo(changes.dtype).tiny)
    curve = torch.ones(experts.count + 1, dtype=torch.float64)
    for few, many, more, less in zip(counts, counts[1:], changes, changes[1:], strict=False):
        steps = torch.arange(many - few + 1, dtype=torch.float64) / (many - few)
        curve[few : many + 1] = more + steps * (less - more)
    return curve


def probed_count(errors: torch.Tensor, experts: ExpertSizes) -> int | None:
    """Return how many experts stay in a layer's probe: about `PROBE_SHARE`; None if a layer must keep all."""
    counts = expert_counts(experts)[:-1]
    return min(counts, key=lambda count: abs(count - PROBE_SHARE * experts.count)) if counts else None
