"""Output curvature: what a small change of a sublayer's output costs the model's output, in nats per token.

A change `δ` of what a sublayer's writer computes makes the model's output diverge by about `½ δᵀ G δ`. `G = E[g gᵀ]`
is the Fisher information: `g` are gradients as of the loss of tokens that are drawn from the model's own predictions
(`stream.output_head`). It is the Hessian of the divergence from the dense model (Martens 2020, arXiv 1412.1193).

Where a norm follows the writer (`compression.branch_norm`), the output of each token counts in units of its root mean
square, as in the statistics: changes are `s δ`, and gradients `g / s`, with the dense model's `s`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from oneshot.linalg.products import product
from oneshot.machine.transfer import to_host

SHRINKAGE = 0.3  # towards its mean: few tokens do not know every direction
STATES = "states"
SMALLEST_MEAN = 1e-30  # of the diagonal; nothing may depend on the output of a layer


@dataclass(frozen=True)
class Curvature:
    """The curvature of every layer and of the states before them, in files of a folder."""

    folder: Path

    def save_states(self, matrix: torch.Tensor) -> None:
        """Write `G (D, D)` of the states before the first layer."""
        save_file(to_host({STATES: matrix}), self.folder / f"{STATES}.safetensors")

    def of_states(self, device: torch.device) -> torch.Tensor:
        """Return `G (D, D)` of the states before the first layer; float32, not shrunk."""
        return _read(self.folder / f"{STATES}.safetensors", STATES, device)

    def save(self, layer: int, matrices: Mapping[str, torch.Tensor]) -> None:
        """Write the matrices of a layer, as `LayerCurvature` has them."""
        save_file(to_host(dict(matrices)), self._path(layer))

    def of_layer(self, layer: int, device: torch.device) -> "LayerCurvature":
        """Return the curvature of a layer for computations on a device."""
        return LayerCurvature(self._path(layer), device)

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer}.safetensors"


@dataclass(frozen=True)
class LayerCurvature:
    """The curvature of one layer: float32 matrices that are read when they are asked for.

    A layer with a carried mixer in the place of attention has only its FFN's.
    """

    path: Path
    device: torch.device

    @property
    def output(self) -> torch.Tensor:
        """Return `G (D, D)` of what attention's output linear computes."""
        return _read(self.path, "output", self.device)

    @property
    def query_key(self) -> torch.Tensor:
        """Return `G` of queries and keys together, before norms and rotation: `((H + G)·h)` in square."""
        return _read(self.path, "query_key", self.device)

    @property
    def ffn(self) -> torch.Tensor:
        """Return `G (D, D)` of what the FFN's down projection computes."""
        return _read(self.path, "ffn", self.device)


def _read(path: Path, name: str, device: torch.device) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        matrix: torch.Tensor = file.get_tensor(name)
    return matrix.to(device)


def shrunk(gram: torch.Tensor) -> torch.Tensor:
    """Return `(1 − s) G + s mean(diag G) I` of `G (n, n)`, which is positive definite."""
    mean = gram.diagonal().mean().clamp_min(SMALLEST_MEAN)
    mixed = (1 - SHRINKAGE) * gram
    mixed.diagonal().add_(SHRINKAGE * mean)
    return mixed


def mean_cost(changes: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """Return the mean of `½ δᵀ G δ` over the rows of `changes (…, D)`, a float64 scalar, in nats per token."""
    rows = changes.flatten(0, -2).to(curvature)
    return 0.5 * (product(rows, curvature) * rows).sum(-1, dtype=torch.float64).mean()


def column_costs(weight: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """Return the diagonal of `Wᵀ G W`, float64 `(n,)`: what the columns of `W (D, n)` cost in place of their norms.

    Products are float32, as those in `G` are.
    """
    columns = weight.to(curvature)
    return (columns * product(curvature, columns)).sum(0, dtype=torch.float64)


def root_of(curvature: torch.Tensor) -> torch.Tensor:
    """Return `L_Gᵀ`, float64 `(D, D)`, `L_G L_Gᵀ = G`: squared errors of what `L_Gᵀ W` computes are `δᵀ G δ`."""
    return torch.linalg.cholesky(curvature.double()).T
