"""Steps of a sublayer before its writer is measured: smaller queries and keys, linears of low rank, fewer experts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from oneshot.compression.expert_removal import keep_experts, measure_effects
from oneshot.compression.inner_heads import InnerMaps, reduce_queries_keys
from oneshot.compression.layer_reports import removal_report
from oneshot.compression.ranks import RankAccumulator, Ranks, with_ranks
from oneshot.compression.statistics import batches_apart
from oneshot.compression.sublayer import SublayerTask
from oneshot.compression.tasks import AttentionTask, ExpertsTask
from oneshot.report.records import SublayerReport
from oneshot.stream import Layer, States
from oneshot.tensors import Tensors

Task = TypeVar("Task", bound=SublayerTask)


@dataclass
class LayerWork:
    """A layer while it is compressed.

    Attributes:
        working: the tensors that the compressed stream passes. maps, ranks: of heads and of linears of low rank, by the
            sublayer's index; they are folded at the end. reports: what was lost.
    """

    working: Tensors
    maps: dict[int, InnerMaps] = field(default_factory=dict)
    ranks: dict[int, Ranks] = field(default_factory=dict)
    reports: list[SublayerReport] = field(default_factory=list)


class Step(ABC, Generic[Task]):
    """A step of one sublayer, with passes over the text."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @property
    @abstractmethod
    def is_needed(self) -> bool:
        """Return whether the plan asks for it."""

    def passes(self, states: States) -> float:
        """Return how many passes over the text it takes."""
        return 1.0

    @abstractmethod
    def apply_(self, work: LayerWork, states: States, current: Layer) -> None:
        """Change the layer, whose present state is `current`."""


class SmallerScores(Step[AttentionTask]):
    """Fewer coordinates of queries and keys."""

    @property
    def is_needed(self) -> bool:
        return self.task.smaller_scores is not None

    def apply_(self, work: LayerWork, states: States, current: Layer) -> None:
        task = self.task
        assert task.smaller_scores is not None
        work.working, work.maps[task.index] = reduce_queries_keys(
            work.working,
            task.mixer,
            task.index,
            task.shape,
            states,
            current,
            size=task.smaller_scores,
            rotary=task.stack.rotary,
            share=task.shared,
        )


class LowRanks(Step[SublayerTask]):
    """Linears of low rank. The pass reads some batches of the text, after the states moved on."""

    @property
    def is_needed(self) -> bool:
        return bool(self.task.ranks)

    def passes(self, states: States) -> float:
        return 1 + states.share_read(self._every(states))

    def apply_(self, work: LayerWork, states: States, current: Layer) -> None:
        task = self.task
        states.settle()
        sums = RankAccumulator(
            *(task.shape, task.sublayer, task.index, work.working, task.machine.device),
            has_curvature=task.curvature is not None,
        )
        for x, _ in states.read(self._every(states)):
            sums.update_(current, x)
        linears = sums.finish(task.machine.workers, task.curvature)
        ranks = task.shared(lambda: {kind: linears[kind].nearest(rank) for kind, rank in task.ranks.items()})
        work.working, work.ranks[task.index] = with_ranks(work.working, task.sublayer.mixer, ranks), ranks

    def _every(self, states: States) -> int:
        """Return n if each n-th batch is read."""
        return batches_apart(states.num_tokens, self.task.shape.hidden_size)


class FewerExperts(Step[ExpertsTask]):
    """Whole experts that go."""

    @property
    def is_needed(self) -> bool:
        return self.task.loses_experts

    def apply_(self, work: LayerWork, states: States, current: Layer) -> None:
        sums = measure_effects(self.task, states, current)
        work.working = keep_experts(self.task, work.working, sums)
        work.reports.append(removal_report(self.task, sums))
