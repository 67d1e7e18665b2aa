"""Neurons inside the experts of a mixture: measured, chosen and corrected expert by expert, and folded.

Every expert is a writer of its own: its neurons are columns that its down projection reads, and its rows are weighted
by its gates. All experts of a model keep equally many neurons, because a stock config states one width. The router
stays as it is. A shared expert whose width is a multiple of the others' shrinks with them, by a task of its own.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from oneshot.architecture import Experts, ExpertSizes, cut
from oneshot.compression.branch_norm import MixtureNorms
from oneshot.compression.correction import Factors, cost_of_columns
from oneshot.compression.expert_correction import ExpertFactors, correct_group, joined, solved_together
from oneshot.compression.expert_removal import keep_experts, measure_effects, named_experts, warn_of_removed
from oneshot.compression.expert_statistics import ExpertAccumulator, ExpertStatistics, squared_gates
from oneshot.compression.statistics import GramAccumulator, damping_of
from oneshot.compression.sublayer import LayerWork, Reduction, SublayerTask
from oneshot.compression.tasks import FeedForwardTask
from oneshot.machine.memory import release_heap
from oneshot.method import SelectorName
from oneshot.report.records import SublayerReport
from oneshot.selection import SELECTORS, Evidence
from oneshot.stream import DensePass, Layer, Routing, States
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)

BLOCKS_PER_PROCESS = 4  # of experts, so that a shared one or rare ones leave no process waiting for long


@dataclass(frozen=True)
class MeasuredExperts:
    """State what is known of the experts before the last group of them is solved.

    Attributes:
        statistics: of the last group; None for a choice by weights alone.
        solved: factors of the groups before it, whose statistics are gone.
        generator: of random choices, which go on from group to group.
    """

    statistics: ExpertStatistics | None
    solved: tuple[ExpertFactors, ...]
    generator: torch.Generator


class SharedExpertTask(FeedForwardTask):
    """The shared expert of a mixture, which all tokens pass; with few of them its ridge grows as the others' do."""

    def shrinkage(self, num_columns: int, num_rows: int) -> float:
        return 0.0


class ExpertsTask(SublayerTask):
    """A mixture loses neurons inside all experts, or whole experts; each is a writer of its own."""

    mixer: Experts

    @property
    def sizes(self) -> ExpertSizes:
        """Return the dense mixture's sizes."""
        assert self.shape.experts is not None
        return self.shape.experts

    @property
    def dense_units(self) -> int:
        return self.shape.intermediate_size

    @property
    def kept_units(self) -> int:
        return self.kept.intermediate_size

    @property
    def selector(self) -> SelectorName:
        return self.method.ffn

    @property
    def asked_residual_weight(self) -> float:
        return self.method.expert_residual_weight

    @property
    def loses_experts(self) -> bool:
        kept = self.kept.num_experts
        return kept is not None and kept < self.sizes.count

    @property
    def groups(self) -> list[range]:
        """Return the numbers of the experts whose statistics are held at the same time, group by group."""
        kept = self.kept.num_experts
        count = self.sizes.count if kept is None else kept
        together = self.machine.experts_together or count
        return [range(first, min(first + together, count)) for first in range(0, count, together)]

    @property
    def passes(self) -> int:
        """Return one pass for each group, and one that brings the states to the experts if several read them there."""
        return (len(self.groups) + (len(self.groups) > 1)) * self.is_solved

    def all_passes(self, states: States) -> float:
        return self.passes + self.loses_experts

    @property
    def generator(self) -> torch.Generator:
        """Return the source of random choices."""
        return torch.Generator().manual_seed(self.seed + self.layer)

    @property
    def shrinks_shared(self) -> bool:
        """Return whether the shared expert loses neurons with the routed ones."""
        return self.is_reduced and self.sizes.shared_count > 0

    @property
    def shared_task(self) -> SharedExpertTask:
        """Return the task of the shared expert as the one FFN of a layer."""
        shared, method, has_dense = self.stack.shared_expert, self.method, self.has_dense
        assert shared is not None
        shape = replace(self.shape, experts=None, intermediate_size=self.sizes.shared(self.dense_units))
        plan = self.plan.with_sizes(intermediate_size=self.sizes.shared(self.kept_units))
        method = replace(method, damping=method.expert_damping, residual_weight=method.expert_residual_weight)
        if self.loses_experts and method.solves:  # what is lost of the layer itself counts in full
            method, has_dense = replace(method, correction="two-stream", residual_weight=1.0), True
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {"stack": self.stack.with_ffn(shared), "shape": shape, "plan": plan, "method": method}
        return SharedExpertTask(**own | changed | {"has_dense": has_dense})

    def shared_accumulator(self, output_size: int | None) -> GramAccumulator | None:
        """Return the sums of what the shared expert's down reads; None if the expert stays."""
        if not self.shrinks_shared:
            return None
        size, device = self.sizes.shared(self.dense_units), self.machine.device
        return GramAccumulator(size, output_size=output_size, device=device)

    @property
    def reductions(self) -> list[Reduction]:
        return [self.remove_experts_] if self.loses_experts else []

    def remove_experts_(self, work: LayerWork, states: States, current: Layer) -> None:
        """Remove whole experts by their effects on the text."""
        sums = measure_effects(self, states, current)
        work.working, kept = keep_experts(self, work.working, sums)
        warn_of_removed(self, kept, sums)
        work.reports.append(SublayerReport("experts", len(sums.tokens), self.kept.num_experts or 0))

    def measure(
        self, tensors: Tensors, states: States, current: Layer, reference: Layer, dense: DensePass
    ) -> tuple[MeasuredExperts, torch.Tensor | None]:
        """Sum the statistics of every expert; the rest as in `SublayerTask.measure`.

        If memory does not hold the statistics of all experts, every group of them (`groups`) has a pass of its own and
        is solved after it. The result has the same bytes on a CPU; a device, which takes several experts at once,
        rounds otherwise.
        """
        generator, solved = self.generator, list[ExpertFactors]()
        *before, last = self.groups
        for group in before:
            statistics, _ = self.measure_group(group, tensors, states, current, reference, dense)
            solved.append(self.solve_group(tensors, statistics, generator))
            del statistics
            release_heap()
        statistics, target = self.measure_group(last, tensors, states, current, reference, dense)
        self.warn_of_rare(statistics)
        return MeasuredExperts(statistics, tuple(solved), generator), target

    def measure_group(
        self, group: range, tensors: Tensors, states: States, current: Layer, reference: Layer, dense: DensePass
    ) -> tuple[ExpertStatistics, torch.Tensor | None]:
        """Sum the statistics of the experts with these numbers; also return what the sublayer should add.

        Only the pass for the last group moves the streams. It also sums the statistics of the shared expert, and
        returns what the sublayer should add to the judged batch; passes before return None for it.
        """
        # 1. The sums, and the share of the dense stream's residual beyond what removed experts leave to the others.
        count, hidden, size = tensors[self.mixer.down].shape
        is_last, with_shared, device = group.stop == count, self.shrinks_shared, self.machine.device
        loses = self.loses_experts and self.method.solves
        output_size = hidden if self.follows_dense or loses else None
        accumulator = ExpertAccumulator(count, size, output_size=output_size, device=device, group=group)
        shared = self.shared_accumulator(output_size) if is_last else None
        target, share, norms = None, 1.0, MixtureNorms.of(self.stack, tensors, device)
        if loses and self.follows_dense:
            arriving = round(states.num_tokens / self.shape.tokens_per_arrival)
            share = self.residual_weight(size, arriving) / states.dense_share

        def lacking(target: torch.Tensor, routing: Routing) -> torch.Tensor:
            """Return what the experts' output lacks for the mixture to add a target `(…, D)` to the stream."""
            residual = target.flatten(0, -2) - current.added(self.index, routing.written)
            return current.before_sum(residual) if norms is None else norms.taken_back(residual, routing)

        for x, dense_state in states.read(again=not is_last):
            # 2. The routing, and what the output lacks: of the whole layer, and of the dense stream.
            routing, lost = current.route(self.index, x), None
            scales = None if norms is None else norms.scales(current, routing.mixed, routing.written)
            if loses:
                lost = lacking(reference.sum(self.index, x) - x, routing)
            if self.follows_dense and dense_state is not None:
                target = self.target_of(x, dense)
                beyond = lacking(target, routing)
                lost = beyond if lost is None else lost + share * (beyond - lost)
            # 3. The experts of a token share it, and a shared expert takes part with a gate of one.
            accumulator.update_(routing, lost, with_shared=with_shared, scales=scales)
            if shared is not None:
                gates = squared_gates(routing.gates, with_shared=True).unsqueeze(1)
                shared.update_(current.shared_neurons(routing.inputs), None if lost is None else lost / gates.to(lost))
        # 4. Without the dense stream the errors are of what the layer added before any reduction.
        if is_last and not self.follows_dense:
            judged, _ = states.read_judged()
            if judged is not None:
                target = reference.sum(self.index, judged) - judged
        # 5. The sums of all workers.
        statistics = accumulator.finish(self.machine.workers)
        if shared is not None:
            statistics = replace(statistics, shared=shared.finish(self.machine.workers))
        return statistics, target if is_last else None

    def solve(self, tensors: Tensors, statistics: MeasuredExperts | None) -> tuple[torch.Tensor, ExpertFactors, None]:
        """Return the kept neurons `(E, m')` and the factors, in all processes; None: no subspaces of values."""
        measured = MeasuredExperts(None, (), self.generator) if statistics is None else statistics
        last = self.solve_group(tensors, measured.statistics, measured.generator, with_shared=self.shrinks_shared)
        factors = joined((*measured.solved, last))
        return factors.kept, factors, None

    def solve_group(
        self,
        tensors: Tensors,
        statistics: ExpertStatistics | None,
        generator: torch.Generator,
        *,
        with_shared: bool = False,
    ) -> ExpertFactors:
        """Return the factors of the experts that the statistics are of, or of all without any, in all processes.

        `with_shared`: also of the shared expert.
        """
        group = range(len(tensors[self.mixer.down])) if statistics is None else statistics.group
        blocks = self.blocks(group, self.machine.workers.size)
        jobs: list[Callable[[], ExpertFactors | Factors]] = [
            partial(self.solve_experts, tensors, statistics, generator, block) for block in blocks
        ]
        costs = self.block_costs(blocks, with_shared=with_shared)
        if with_shared:
            of_shared = None if statistics is None else statistics.shared
            jobs.append(lambda: self.shared_task.solve_alone(tensors, of_shared)[1])
        return joined([*self.machine.workers.share_all(jobs, costs)])

    def blocks(self, group: range, num_processes: int) -> list[range]:
        """Return the experts of a group in blocks, which the processes share out; for one process there is one."""
        if num_processes == 1 or self.selector == "random":  # whose numbers go on from expert to expert
            return [group]
        together = solved_together(self.dense_units, self.shape.hidden_size, self.machine.device)
        length = together * max(1, len(group) // (BLOCKS_PER_PROCESS * num_processes * together))
        return [group[first : first + length] for first in range(0, len(group), length)]

    def block_costs(self, blocks: Sequence[range], *, with_shared: bool) -> list[float]:
        """Return the costs of blocks of experts, and of the shared expert after them."""
        hidden, width = self.shape.hidden_size, self.dense_units
        costs = [len(block) * cost_of_columns(hidden, width) for block in blocks]
        return costs + ([cost_of_columns(hidden, self.sizes.shared(width))] if with_shared else [])

    def solve_experts(
        self, tensors: Tensors, statistics: ExpertStatistics | None, generator: torch.Generator, block: range
    ) -> ExpertFactors:
        """Return the factors of some experts of those that the statistics are of, in this process alone."""
        down = tensors[self.mixer.down]
        kept = torch.arange(self.dense_units, device=self.machine.device).repeat(len(block), 1)
        if self.is_reduced:
            evidence = self.evidence(tensors, block, statistics, generator)
            kept = SELECTORS[self.selector].neurons_of_experts(evidence, self.kept_units)
        return correct_group(self, down, block, kept, statistics, self.dampings(statistics, len(down)))

    def fold(self, tensors: Tensors, factors: ExpertFactors) -> Tensors:
        down = self.mixer.down
        others = {name: tensor for name, tensor in tensors.items() if name != down}
        folded = tensors | cut(others, self.mixer.axes(self.shape), {"neurons": factors.kept})
        folded[down] = factors.weight.to(tensors[down].device)
        return folded if factors.shared is None else self.shared_task.fold(folded, factors.shared)

    def dampings(self, statistics: ExpertStatistics | None, count: int) -> list[float]:
        """Return the ridge of every expert."""
        asked = self.method.expert_damping
        if statistics is None:
            return [asked] * count
        return [damping_of(asked, self.dense_units, rows) for rows in statistics.num_rows.tolist()]

    def evidence(
        self, tensors: Tensors, group: range, statistics: ExpertStatistics | None, generator: torch.Generator
    ) -> list[Evidence]:
        """Return the evidence of every expert of a group.

        The Gram of a rare expert shrinks towards a multiple of the identity, so that an expert without tokens keeps the
        neurons with the largest outputs per unit of activation.
        """
        mixer, device = self.mixer, self.machine.device
        down, gate_up = tensors[mixer.down].to(device), tensors[mixer.gate_up].to(device)
        dampings, curvature, norms = self.dampings(statistics, len(down)), None, None
        if self.curvature is None:
            norms = MixtureNorms.of(self.stack, tensors, device)
        else:
            curvature = self.curvature.ffn  # of the output before norms
        return [
            Evidence(
                consumer=down[expert] if norms is None else norms.seen(down[expert]),
                producer_energy=gate_up[expert].float().square().sum(1).unflatten(0, (2, -1)).sum(0)
                if self.needs("producers")
                else None,
                gram=None
                if statistics is None
                else _shrunk(statistics.of(expert).gram, dampings[expert] - self.method.expert_damping),
                generator=generator,
                pivoting=self.method.pivoting,
                group_size=self.method.pivot_group_size,
                curvature=curvature,
            )
            for expert in group
        ]

    def warn_of_rare(self, statistics: ExpertStatistics) -> None:
        """Warn of experts that got no token, or too few for a good correction, by their numbers in the result."""
        tokens = statistics.num_rows.tolist()
        unseen = [expert for expert, rows in enumerate(tokens) if not rows]
        rare = [expert for expert, rows in enumerate(tokens) if 0 < rows < self.dense_units]
        if unseen:
            logger.warning(
                "Layer %d: %d of %d experts (%s) got no calibration token, so nothing is known of what they do, and "
                "they are not corrected; give text of every kind that the model is for, or more --num-sequences.",
                *(self.number, len(unseen), len(tokens), named_experts(unseen)),
            )
        if rare and self.method.correction != "none":
            logger.warning(
                "Layer %d: %d of %d experts (%s) saw fewer calibration tokens than their %d neurons, so their "
                "corrections are weak; give more --num-sequences.",
                *(self.number, len(rare), len(tokens), named_experts(rare), self.dense_units),
            )


def _shrunk(gram: torch.Tensor, by: float) -> torch.Tensor:
    """Return `G + by · mean(diag G) I`, and the identity for a Gram of nothing."""
    mean = gram.diagonal().mean()
    ridge = torch.where(mean > 0, by * mean, 1.0)
    return gram + ridge * torch.eye(len(gram), device=gram.device) if by > 0 else gram
