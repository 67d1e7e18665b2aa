"""The norms between the output of experts and the stream, where they have one of their own: `y → N(N₂(y) + d)`.

`d` is what the FFN beside the experts adds. To first order the stream gets `s γ γ₂ y` with `s = 1 / (rms(y) rms(u))`
and `u = N₂(y) + d`: experts are measured, chosen and corrected as writers before one norm are (`branch_norm`).
"""

from dataclasses import dataclass, replace

import torch

from oneshot.architecture import Experts, Norm, Stack
from oneshot.compression.branch_norm import BranchNorm
from oneshot.stream import Layer, Routing
from oneshot.tensors import Tensors


@dataclass(frozen=True)
class MixtureNorms:
    """The experts' own norm `N₂`, and the norm `N` of the sum of both branches; `index`: of their sublayer."""

    mixer: Experts
    index: int
    own: BranchNorm
    outer: BranchNorm

    @classmethod
    def of(cls, stack: Stack, tensors: Tensors, device: torch.device) -> "MixtureNorms | None":
        """Return the norms of a layer with these tensors; None if none follow its experts, or it has none."""
        mixer, index = stack.experts, stack.index_of("ffn")
        if mixer is None or mixer.branches is None:
            return None
        sublayer = stack.sublayers[index]
        own = BranchNorm.of(replace(sublayer, inside=Norm(mixer.branches.after)), tensors, device)
        outer = BranchNorm.of(sublayer, tensors, device)
        assert own is not None
        assert outer is not None
        return cls(mixer, index, own, outer)

    @property
    def beside(self) -> str:
        """Return the module whose output is added to the output of the experts' own norm."""
        assert self.mixer.branches is not None
        return self.mixer.branches.shared_after

    @property
    def gain(self) -> torch.Tensor:
        """Return `γ γ₂ (D,)`, float64."""
        return self.own.gain * self.outer.gain

    def scales(self, layer: Layer, mixed: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """Return `s (tokens, 1)` of a batch, float32; `mixed`, `written`: as in `Routing`."""
        own = self.own.scales(mixed, layer.after_experts(self.mixer, mixed))
        return own * self.outer.scales(written, layer.added(self.index, written))

    def taken_back(self, residual: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return what `s y` lacks for the stream to gain a residual `(tokens, D)`."""
        behind = self.outer.taken_back(residual, routing.written) / self.outer.gain.to(residual.dtype)
        return self.own.taken_back(behind, routing.mixed) / self.own.gain.to(residual.dtype)

    def seen(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `γ γ₂ W`, float32, for the down `(D, m)` of an expert."""
        return self.gain.float().unsqueeze(1) * weight.float()
