"""What fewer experts cost in one layer of a mixture: their joint effects on its output, for every number that stays."""

import numpy as np
import torch

from oneshot.architecture import ExpertSizes
from oneshot.compression.expert_scores import ExpertSums, removed_experts
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
    changes = np.maximum.accumulate(lost[::-1])[::-1]  # sets are local optima
    changes = changes / max(changes[0], np.finfo(np.float64).tiny)
    return torch.from_numpy(np.interp(range(experts.count + 1), counts, changes))


def probed_count(experts: ExpertSizes) -> int | None:
    """Return how many experts stay in a layer's probe: about `PROBE_SHARE`; None if a layer must keep all."""
    counts = expert_counts(experts)[:-1]
    return min(counts, key=lambda count: abs(count - PROBE_SHARE * experts.count)) if counts else None
