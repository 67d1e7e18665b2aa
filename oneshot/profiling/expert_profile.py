"""What narrower experts cost in one layer of a mixture: statistics of all its experts, and their one error curve.

The same pass sums what whole experts do (`expert_counts`). If memory does not hold the statistics of all experts, every
group of them (`ExpertsTask.groups`) has passes of its own. On a CPU the result has the same bytes.

All experts of a layer keep equally many neurons, each its own, as a run chooses and corrects them. Errors of different
experts are taken as orthogonal, so the layer's error is the sum of theirs. A shared expert that shrinks with them is
one more.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from oneshot.checkpoint import Model
from oneshot.compression.branch_norm import MixtureNorms
from oneshot.compression.correction import Factors, predicted_energies, relative
from oneshot.compression.curvature import LayerCurvature, root_of
from oneshot.compression.expert_correction import ExpertFactors, joined
from oneshot.compression.expert_removal import add_effects_
from oneshot.compression.expert_scores import ExpertSums
from oneshot.compression.expert_statistics import ExpertAccumulator, ExpertStatistics
from oneshot.compression.experts import ExpertsTask
from oneshot.compression.fold import augmented_weight
from oneshot.linalg.interpolative import missed_energies, ordered_factor
from oneshot.linalg.pivoted_qr import weighted_pivots
from oneshot.machine import ALONE, Machine, Workers
from oneshot.machine.sharing import Loads
from oneshot.method import Method
from oneshot.planning import dense_plan
from oneshot.profiling.probes import probe_size
from oneshot.selection import pivots_of_experts
from oneshot.stream import Layer
from oneshot.tensors import Tensors

Energies = tuple[torch.Tensor, torch.Tensor]
Narrowed = tuple[ExpertFactors, list[Energies]]
"""Kept neurons of a group of experts, corrected, and energies of the error and of the output of each. The last group
has the shared expert as one more, if it shrinks with the others."""


def experts_task(
    model: Model, machine: Machine, layer: int, kept: int, curvature: LayerCurvature | None = None
) -> ExpertsTask:
    """Return the task of `kept` neurons in every expert of a layer, for one worker, with the default settings."""
    method = Method(ffn="id", heads="none", correction="same-layer", experts="effects")
    stack = model.family.stack_of(layer)
    plan = dense_plan(model.shape, method).with_sizes(intermediate_size=kept)
    alone, index = replace(machine, workers=ALONE), stack.index_of("ffn")
    return ExpertsTask(
        *(method, model.shape, plan, None, alone, stack, layer, index), seed=0, curvature=curvature, has_dense=False
    )


class MixtureSums:
    """Sum what a layer's experts are profiled from while the text moves through it.

    Args:
        task: of any width below the full. tensors: the layer's. probed: the kinds of `PROBED_KINDS` that are measured.
        group: the experts whose neurons are; None for all. The shared expert is measured with the last of all.
    """

    def __init__(self, task: ExpertsTask, tensors: Tensors, probed: Sequence[str], group: range | None = None) -> None:
        assert task.shape.experts is not None
        self._task, self._tensors = task, tensors
        count, device = task.shape.experts.count, task.machine.device
        self._effects = ExpertSums(count, device) if "experts" in probed else None
        self._experts, self._shared, self._norms = None, None, MixtureNorms.of(task.stack, tensors, device)
        if "ffn" in probed:
            group = range(count) if group is None else group
            self._shared = task.shared_accumulator(None) if group.stop == count else None
            self._experts = ExpertAccumulator(count, task.dense_units, output_size=None, device=device, group=group)

    def update_(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """Add a batch of the stream before the experts, and return what they write, `(tokens, D)`."""
        routing = layer.route(self._task.index, x)
        if self._experts is not None:
            scales = None if self._norms is None else self._norms.scales(layer, routing.mixed, routing.written)
            self._experts.update_(routing, scales=scales)
        if self._shared is not None:
            self._shared.update_(layer.shared_neurons(routing.inputs))
        if self._effects is not None:
            add_effects_(self._effects, self._task, layer, routing)
        return routing.written

    def statistics(self, workers: Workers) -> ExpertStatistics | None:
        """Return the sums of all workers from which narrower experts are profiled."""
        if self._experts is None:
            return None
        shared = None if self._shared is None else self._shared.finish(workers)
        return replace(self._experts.finish(workers), shared=shared)

    def effects(self, workers: Workers) -> ExpertSums | None:
        """Return the sums of all workers from which fewer experts are profiled."""
        return None if self._effects is None else self._effects.of_all(workers)


class NarrowerExperts:
    """Measure what fewer neurons in every expert of a layer cost, from the statistics of one group after the other.

    All groups come once for the curve, which decides how many neurons stay in the layer's probe. The last group is
    corrected for so many at once, and the others when they come again (`order`). The workers share out the experts.

    Args:
        task: of any width below the full. tensors: the layer's. workers, loads: as in `Workers.share_all`.

    Attributes:
        errors: the relative squared error of the layer's experts with their k best neurons, for every k: `(m + 1,)`. It
            is of the best correction of every expert by itself, as in `Profile.ffn_errors`. The Gram of a rare expert
            is the one that its neurons are chosen by. An expert without tokens adds nothing.
        tokens: of every expert, float64 `(E,)`.
    """

    def __init__(
        self, task: ExpertsTask, tensors: Tensors, workers: Workers = ALONE, loads: Loads | None = None
    ) -> None:
        self._task, self._tensors, self._workers, self._loads = task, tensors, workers, loads
        self._missed = torch.zeros(task.dense_units + 1, dtype=torch.float64)
        self._narrowed: dict[int, Narrowed] = {}
        self.errors = torch.empty(0, dtype=torch.float64)
        self.tokens = torch.zeros(task.sizes.count, dtype=torch.float64)

    @property
    def order(self) -> list[range]:
        """Return the groups in the order that they come in."""
        groups = self._task.groups
        return [*groups, *groups[:-1]]

    def add_(self, statistics: ExpertStatistics) -> None:
        """Add the next group of experts, and with the last of all the shared expert, in all processes."""
        if not len(self.errors):
            self._add_missed_(statistics)
            self.tokens = statistics.num_rows.double()
            if statistics.group.stop < len(statistics.num_rows):
                return
            self.errors = self._missed / self._missed[0].clamp_min(torch.finfo(self._missed.dtype).tiny)
            width, step = self._task.shape.intermediate_size, self._task.shape.width_step
            kept = min(width, probe_size(self.errors[::step]) * step)
            self._task = replace(self._task, plan=self._task.plan.with_sizes(intermediate_size=kept))
        self._narrowed[statistics.group.start] = narrow(
            self._task, self._tensors, statistics, self._workers, self._loads
        )

    def _add_missed_(self, statistics: ExpertStatistics) -> None:
        """Add the squared error of a group of experts with their k best neurons, for every k."""
        task, shared = self._task, statistics.shared
        blocks = task.blocks(statistics.group, self._workers.size)
        jobs = [partial(_missed_by_experts, task, self._tensors, statistics, block) for block in blocks]
        if shared is not None:
            jobs.append(partial(_missed_by_shared, task, self._tensors, statistics))
        costs = task.block_costs(blocks, with_shared=shared is not None)
        for curves in self._workers.share_all(jobs, costs, self._loads):
            for curve in curves:  # in the order of one process
                self._missed += curve

    def narrowed(self) -> tuple[Tensors, float]:
        """Return the layer with the neurons of the probe in every expert, corrected, and its relative squared error."""
        return join(self._task, self._tensors, [self._narrowed[first] for first in sorted(self._narrowed)])


def _missed_by_experts(
    task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics, block: range
) -> list[torch.Tensor]:
    """Return the squared errors `(m + 1,)` of the experts of a block that saw tokens."""
    evidence, seen = task.evidence(tensors, block, statistics, task.generator), _seen(task)
    orders = pivots_of_experts(evidence, task.dense_units)
    return [
        missed_energies(ordered_factor(one.known_gram(), order), seen(one.consumer[:, order]))
        for expert, one, order in zip(block, evidence, orders, strict=True)
        if statistics.num_rows[expert]
    ]


def _missed_by_shared(task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics) -> list[torch.Tensor]:
    """Return the squared error `(m + 1,)` of the shared expert, by the widths of the others."""
    assert statistics.shared is not None
    gram, [first] = statistics.shared.gram, task.evidence(tensors, statistics.group[:1], statistics, task.generator)
    shared = replace(first, consumer=_shared_down(task, tensors), gram=gram)
    order = weighted_pivots(*shared.neurons(), rank=len(gram))
    of_shared = missed_energies(ordered_factor(gram, order), _seen(task)(shared.consumer[:, order]))
    return [of_shared[:: len(gram) // task.dense_units]]


def narrow(
    task: ExpertsTask,
    tensors: Tensors,
    statistics: ExpertStatistics,
    workers: Workers = ALONE,
    loads: Loads | None = None,
) -> Narrowed:
    """Return the kept neurons of every expert of a group, corrected; `workers`, `loads`: as in `Workers.share_all`."""
    blocks, with_shared = task.blocks(statistics.group, workers.size), task.shrinks_shared
    with_shared = with_shared and statistics.shared is not None
    jobs: list[Callable[[], tuple[ExpertFactors | Factors, list[Energies]]]] = [
        partial(_narrowed_experts, task, tensors, statistics, block) for block in blocks
    ]
    if with_shared:
        jobs.append(partial(_narrowed_shared, task, tensors, statistics))
    found = [*workers.share_all(jobs, task.block_costs(blocks, with_shared=with_shared), loads)]
    return joined([factors for factors, _ in found]), [pair for _, energies in found for pair in energies]


def _narrowed_experts(
    task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics, block: range
) -> tuple[ExpertFactors, list[Energies]]:
    factors, seen = task.solve_experts(tensors, statistics, torch.Generator(), block), _seen(task)
    device = task.machine.device
    norms, downs = MixtureNorms.of(task.stack, tensors, device), tensors[task.mixer.down].to(device)
    if norms is not None and task.curvature is None:
        seen = norms.seen
    return factors, [
        predicted_energies(seen(downs[expert]), seen(weight), columns, statistics.of(expert))
        for expert, weight, columns in zip(block, factors.weight, factors.kept, strict=True)
    ]


def _narrowed_shared(
    task: ExpertsTask, tensors: Tensors, statistics: ExpertStatistics
) -> tuple[Factors, list[Energies]]:
    assert statistics.shared is not None
    down, seen = _shared_down(task, tensors), _seen(task)
    _, shared, _ = task.shared_task.solve(tensors, statistics.shared)
    return shared, [predicted_energies(seen(down), seen(shared.weight), shared.kept_columns, statistics.shared)]


def join(task: ExpertsTask, tensors: Tensors, groups: Sequence[Narrowed]) -> tuple[Tensors, float]:
    """Return the layer with the kept neurons of all groups of experts in order, and its relative squared error."""
    factors = joined([one for one, _ in groups])
    energies = [pair for _, of_group in groups for pair in of_group]
    error, energy = (torch.stack(parts).sum() for parts in zip(*energies, strict=True))
    return task.fold(tensors, factors), relative(error, energy) ** 2


def _seen(task: ExpertsTask) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes float64 weights `(D, n)` whose squared errors count by the layer's curvature, if it has one."""
    if task.curvature is None:
        return torch.Tensor.double
    root = root_of(task.curvature.ffn)
    return lambda weight: root @ weight.double()


def _shared_down(task: ExpertsTask, tensors: Tensors) -> torch.Tensor:
    assert task.stack.shared_expert is not None
    return augmented_weight(tensors, task.stack.shared_expert.down).to(task.machine.device)
