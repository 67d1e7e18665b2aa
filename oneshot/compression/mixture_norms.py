"""The norms between the output of experts and the stream, where they have one of their own: `y → N(N₂(y) + d)`.

`d` is what the FFN beside the experts adds. To first order the stream gets `s γ γ₂ y` with `s = 1 / (rms(y) rms(u))`
and `u = N₂(y) + d`: experts are measured, chosen and corrected as writers before one norm are (`branch_norm`).
"""

from dataclasses import dataclass, replace

import torch

from oneshot.compression.branch_norm import BranchNorm
from oneshot.compression.tasks import ExpertsTask
from oneshot.families import Norm
from oneshot.stream import Layer, Routing
from oneshot.tensors import Tensors


@dataclass(frozen=True)
class MixtureNorms:
    """The experts' own norm `N₂`, and the norm `N` of the sum of both branches."""

    task: ExpertsTask
    own: BranchNorm
    outer: BranchNorm

    @classmethod
    def of(cls, task: ExpertsTask, tensors: Tensors) -> "MixtureNorms | None":
        """Return the norms of a layer with these tensors; None if none follow its experts."""
        branches, device = task.mixer.branches, task.machine.device
        if branches is None:
            return None
        own = BranchNorm.of(replace(task.sublayer, inside=Norm(branches.after)), tensors, device)
        outer = BranchNorm.of(task.sublayer, tensors, device)
        assert own is not None
        assert outer is not None
        return cls(task, own, outer)

    @property
    def gain(self) -> torch.Tensor:
        """Return `γ γ₂ (D,)`, float64."""
        return self.own.gain * self.outer.gain

    def scales(self, layer: Layer, routing: Routing) -> torch.Tensor:
        """Return `s (tokens, 1)` of a batch, float32."""
        own = self.own.scales(routing.mixed, layer.after_experts(self.task.mixer, routing.mixed))
        return own * self.outer.scales(routing.written, layer.added(self.task.index, routing.written))

    def taken_back(self, residual: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return what `s y` lacks for the stream to gain a residual `(tokens, D)`."""
        behind = self.outer.taken_back(residual, routing.written) / self.outer.gain.to(residual.dtype)
        return self.own.taken_back(behind, routing.mixed) / self.own.gain.to(residual.dtype)

    def seen(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `γ γ₂ W`, float32, for the down `(D, m)` of an expert."""
        return self.gain.float().unsqueeze(1) * weight.float()
