"""Correct a writer before the norm of its branch: the stream gets `N(y) = γ y / rms(y)` of the output `y = W a`.

To first order a change `δ` of the output changes the stream by `γ s (δ − ŷ ŷᵀ δ)`. Here `s = 1 / rms(y)` is of the
dense output, and `ŷ` its direction. The error is at most `Σ s² ‖γ δ‖²` over the tokens. So the writer is fitted to its
own dense output, and every token counts by `s`: without it, tokens of a large output would dominate. Pivots are chosen
and errors reported for `γ W`; the solution of a row of `W` does not depend on its scale.

Between the output of experts and the stream there may be two norms (Gemma 4): `y → N(N₂(y) + d)`, where `d` is what the
FFN beside the experts adds. To first order the stream gets `s γ γ₂ y` with `s = 1 / (rms(y) rms(u))` and
`u = N₂(y) + d`: experts are measured, chosen and corrected as writers before one norm are.
"""

from dataclasses import dataclass, replace

import torch

from oneshot.architecture import Experts, Norm, Stack, Sublayer
from oneshot.compression.correction import Factors
from oneshot.compression.fold import augmented_weight
from oneshot.machine.transfer import as_like
from oneshot.stream import Layer, Routing
from oneshot.tensors import Tensors

SMALLEST_GAIN = 1e-6  # of the largest: such rows reach the stream no more, but count in the root mean square
SOFT_GAIN = 0.1  # of the mean square: weaker coordinates take less of a residual, which division would amplify


@dataclass(frozen=True)
class BranchNorm:
    """The norm after a writer: its `gain (D,)`, float64 on the compute device."""

    gain: torch.Tensor

    @classmethod
    def of(cls, sublayer: Sublayer, tensors: Tensors, device: torch.device) -> "BranchNorm | None":
        """Return the norm inside a sublayer of a layer with these tensors; None without one."""
        norm = sublayer.inside
        if norm is None:
            return None
        assert not norm.centres, "no family has a LayerNorm inside its branches"
        gain = tensors[f"{norm.name}.weight"].to(device).double() + norm.offset
        largest = gain.abs().max()
        smallest = torch.where(largest > 0, SMALLEST_GAIN * largest, 1.0)  # any will do where the branch adds nothing
        return cls(torch.where(gain.abs() < smallest, smallest, gain))

    def scales(self, written: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Return `s (tokens, 1)` from the writer's rows `(tokens, D)` and what the stream gets of them."""
        seen = (written.float() * self.gain.float()).norm(dim=1, keepdim=True)
        return added.float().norm(dim=1, keepdim=True) / seen.clamp_min(torch.finfo(torch.float32).tiny)

    def scales_of(self, layer: Layer, index: int, inner: torch.Tensor) -> torch.Tensor:
        """Return the same for what the writer reads, `inner (tokens, n)`."""
        written = layer.write(index, inner)
        return self.scales(written, layer.added(index, written))

    def taken_back(self, residual: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """Return what the rows `s γ y` lack for the stream to gain a residual `(tokens, D)`.

        A change along the output itself does nothing behind the norm, so the residual loses its part along it.
        """
        gain = self.gain.float()
        direction = torch.nn.functional.normalize(written.float(), dim=1)
        change = residual.float() * (gain / (gain.square() + SOFT_GAIN * gain.square().mean()))
        change -= direction * (direction * change).sum(1, keepdim=True)
        return (change * gain).to(residual.dtype)

    def seen(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `γ W`, float64, for a writer `(D, n)`."""
        return self.gain.unsqueeze(1) * as_like(weight, self.gain)

    def curvature_of_seen(self, curvature: torch.Tensor) -> torch.Tensor:
        """Convert the curvature in `s y` to `s γ y`, the scale of `seen` weights; float64 `(D, D)`."""
        return curvature.to(self.gain) / (self.gain.unsqueeze(1) * self.gain)

    def unseen(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `seen`."""
        return weight / self.gain.unsqueeze(1)


def seen_writer(sublayer: Sublayer, tensors: Tensors, device: torch.device) -> tuple[torch.Tensor, BranchNorm | None]:
    """Return a writer with its bias, as the norm that may follow it lets the stream see it; and that norm."""
    weight = augmented_weight(tensors, sublayer.writer).to(device)
    norm = BranchNorm.of(sublayer, tensors, device)
    return weight if norm is None else norm.seen(weight), norm


def unseen(factors: Factors, norm: BranchNorm | None) -> Factors:
    """Convert factors of the writer with its norm into factors of the writer's own weight."""
    return factors if norm is None else replace(factors, weight=norm.unseen(factors.weight))


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


def at_scaled(gradients: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the gradients at `s y` from those at `y (tokens, D)`, float32, for constant scales `s (tokens, 1)`.

    Outputs that are zero have none.
    """
    return torch.where(scales > 0, gradients.float() / scales, 0.0)
