"""What fewer experts cost in one layer of a mixture: their joint effects on its output, for every number that stays.

Servers that remove experts when they load a model take them from a list, so the experts also have an order.
"""

import numpy as np
import torch

from oneshot.architecture import ExpertSizes
from oneshot.compression.expert_scores import ExpertSums, removed_experts, super_experts
from oneshot.linalg.expert_sets import removal_order
from oneshot.planning import expert_counts
from oneshot.profiling.probes import PROBE_SHARE


def count_curve(sums: ExpertSums, experts: ExpertSizes) -> tuple[torch.Tensor, float]:
    """Return what a layer loses with every number of experts, float64 `(E + 1,)`, as `Profile.expert_errors`.

    Sets are chosen, and their effects summed, for the numbers that a layer may keep. Between them the curve is a line.
    Also return the squared error of which these are shares.
    """
    effects, counts, lost = sums.effects.double().cpu(), expert_counts(experts), []
    for count in counts:
        gone = removed_experts("effects", sums, experts.count - count, torch.Generator())
        lost.append(float(effects[gone][:, gone].sum()))
    changes = np.maximum.accumulate(lost[::-1])[::-1]  # sets are local optima
    most = max(changes[0], np.finfo(np.float64).tiny)
    return torch.from_numpy(np.interp(range(experts.count + 1), counts, changes / most)), float(most)


def expert_order(sums: ExpertSums) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of a layer from the most to the least needed, and the squared error if only those before stay.

    Both are float64 `(E,)`. The errors fall: the last is of the least needed expert alone. Super experts come first.
    """
    order, changes = removal_order(sums.effects, kept=super_experts(sums.peaks))
    errors = np.maximum.accumulate(changes.clamp_min(0).numpy())[::-1]
    return order.flip(0).double(), torch.from_numpy(errors.copy())


def probed_count(experts: ExpertSizes) -> int | None:
    """Return how many experts stay in a layer's probe: about `PROBE_SHARE`; None if a layer must keep all."""
    counts = expert_counts(experts)[:-1]
    return min(counts, key=lambda count: abs(count - PROBE_SHARE * experts.count)) if counts else None
