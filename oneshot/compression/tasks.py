"""The tasks of a layer, one class for each type of mixer: attention or a carried mixer, one FFN or experts.

`ways` has the way through each of them.
"""

from abc import abstractmethod
from dataclasses import replace

import torch

from oneshot.architecture import Attention, Carried, Experts, FeedForward, Mixer
from oneshot.compression.fold import head_columns, row_energy
from oneshot.compression.inner_heads import InnerMaps, keep_heads
from oneshot.compression.ranks import Ranks
from oneshot.compression.sublayer import SublayerTask, takes_sketch
from oneshot.method import SelectorName
from oneshot.selection import Evidence, select_heads, select_neurons
from oneshot.tensors import Tensors


class OneWriterTask(SublayerTask):
    """A sublayer whose one writer reads the rows of all tokens."""

    @property
    def corrects_whole_heads(self) -> bool:
        """Return whether the correction has one number for each pair of heads."""
        return False

    @property
    def neuron_curvature(self) -> torch.Tensor | None:
        """Return the output curvature by which neurons are chosen; None without it."""
        return None

    def columns_of(self, units: torch.Tensor) -> torch.Tensor:
        """Return the columns of heads or neurons, ascending."""
        return units

    @abstractmethod
    def choose(self, evidence: Evidence) -> torch.Tensor:
        """Return the heads or neurons that stay, ascending."""

    @abstractmethod
    def producer_energy(self, tensors: Tensors) -> torch.Tensor:
        """Return the squared norms of the rows that make each column of the writer."""


class AttentionTask(OneWriterTask):
    """Attention loses heads, or sizes inside them."""

    @property
    def mixer(self) -> Attention:
        mixer = self.sublayer.mixer
        assert isinstance(mixer, Attention)
        return mixer

    @property
    def dense_units(self) -> int:
        return self.shape.num_attention_heads

    @property
    def kept_units(self) -> int:
        return self.kept.num_attention_heads

    @property
    def num_columns(self) -> int:
        return self.dense_units * self.shape.head_dim

    @property
    def selector(self) -> SelectorName:
        return self.method.heads

    @property
    def smaller_scores(self) -> int | None:
        return self.kept.query_key_size

    @property
    def smaller_values(self) -> int | None:
        return self.kept.value_size

    @property
    def follows_dense(self) -> bool:
        """Return whether the target comes from the dense stream.

        By default attention follows it only for a smaller hidden size: fewer heads that follow it diverge
        (benchmarks/records/experiments.md).
        """
        return super().follows_dense and (self.corrects_slices or self.method.heads_correction == "two-stream")

    @property
    def corrects_whole_heads(self) -> bool:
        return self.is_reduced and self.method.heads_correction == "head-level"

    def columns_of(self, units: torch.Tensor) -> torch.Tensor:
        return head_columns(units, self.shape.head_dim)

    def choose(self, evidence: Evidence) -> torch.Tensor:
        return select_heads(
            self.selector,
            evidence,
            num_groups=self.shape.num_key_value_heads,
            heads_per_group=self.shape.heads_per_group,
            kept_groups=self.kept.num_key_value_heads,
            kept_heads_per_group=self.kept.num_attention_heads // self.kept.num_key_value_heads,
        )

    def producer_energy(self, tensors: Tensors) -> torch.Tensor:
        group_of_head = torch.arange(self.dense_units) // self.shape.heads_per_group
        values = row_energy(tensors, self.mixer.v).view(-1, self.shape.head_dim)
        return values[group_of_head].flatten()

    def maps_after(self, maps: InnerMaps, units: torch.Tensor, values: torch.Tensor | None) -> InnerMaps:
        kept = keep_heads(maps, units, self.shape.heads_per_group)
        kept = kept if values is None else replace(kept, values=values)
        return replace(kept, heads=units) if self.mixer.fixed_heads and self.is_reduced else kept


class FeedForwardTask(OneWriterTask):
    """A feed-forward network loses neurons; one beside the experts of other layers stays as it is."""

    @property
    def mixer(self) -> FeedForward:
        mixer = self.sublayer.mixer
        assert isinstance(mixer, FeedForward)
        return mixer

    @property
    def dense_units(self) -> int:
        return self.shape.layer(self.layer).intermediate_size

    @property
    def kept_units(self) -> int:
        if self.shape.experts is not None:
            return self.dense_units
        return self.plan.shape_of_layer(self.shape, self.layer).layer(self.layer).intermediate_size

    @property
    def selector(self) -> SelectorName:
        return self.method.ffn

    @property
    def takes_sketch(self) -> bool:
        return self.is_reduced and takes_sketch(self.method)

    @property
    def corrects_up(self) -> bool:
        """Return whether `up_proj` is also corrected; `Method` and `Grid.settle` refuse it where it cannot be."""
        return self.method.up_steps > 0 and self.is_reduced

    @property
    def neuron_curvature(self) -> torch.Tensor | None:
        return None if self.curvature is None else self.curvature.ffn

    def choose(self, evidence: Evidence) -> torch.Tensor:
        return select_neurons(self.selector, self.kept_units, evidence)

    def producer_energy(self, tensors: Tensors) -> torch.Tensor:
        return row_energy(tensors, *self.mixer.readers)

    def ranks_after(self, ranks: Ranks, units: torch.Tensor) -> Ranks:
        return {kind: one.rows(units) for kind, one in ranks.items()} if self.is_reduced else ranks


class ExpertsTask(SublayerTask):
    """A mixture loses neurons inside all experts, or whole experts; each is a writer of its own (`experts`)."""

    @property
    def mixer(self) -> Experts:
        mixer = self.sublayer.mixer
        assert isinstance(mixer, Experts)
        return mixer

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
        experts, kept = self.shape.experts, self.kept.num_experts
        return experts is not None and kept is not None and kept < experts.count

    @property
    def groups(self) -> list[range]:
        """Return the numbers of the experts whose statistics are held at the same time, group by group."""
        experts, kept = self.shape.experts, self.kept.num_experts
        assert experts is not None
        count = experts.count if kept is None else kept
        together = self.machine.experts_together or count
        return [range(first, min(first + together, count)) for first in range(0, count, together)]

    @property
    def passes(self) -> int:
        """Return one pass for each group, and one that brings the states to the experts if several read them there."""
        return (len(self.groups) + (len(self.groups) > 1)) * self.is_solved


class CarriedTask(SublayerTask):
    """A carried mixer stays as it is."""

    @property
    def dense_units(self) -> int:
        return 1

    @property
    def kept_units(self) -> int:
        return 1

    @property
    def selector(self) -> SelectorName:
        return "none"

    @property
    def is_solved(self) -> bool:
        return False


TASKS: dict[type[Mixer], type[SublayerTask]] = {
    Attention: AttentionTask,
    Carried: CarriedTask,
    FeedForward: FeedForwardTask,
    Experts: ExpertsTask,
}
"""The task of a sublayer by the type of its mixer."""
