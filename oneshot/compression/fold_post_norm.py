"""Folding for norms that follow the sums, as BERT's do: the stream in subspaces of its own at every position.

A LayerNorm reads only `R z`, the sum without its mean over the D coordinates. Position p has a subspace `U (D, d)` and
stores `n = Uᵀ R z / √(‖Uᵀ R z‖² / D + ε)`. Everything else of the norm goes into the linears that read `n`, and a
matrix carries the stream from position to position (SP3 equations 5 to 8, 17 and 18). It is exact at full width.
"""

from typing import Any

import torch
from torch import nn

from oneshot.architecture import Stack
from oneshot.compression.fold import times, without_mean
from oneshot.machine.transfer import as_like
from oneshot.tensors import Tensors


class SubspaceNorm(nn.Module):
    """A LayerNorm whose input is first projected: `γ ⊙ U n + β` in the model's own coordinates.

    Args:
        norm: the LayerNorm over D coordinates. basis: `U (D, d)` with orthonormal columns.
    """

    def __init__(self, norm: Any, basis: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.basis = basis.to(norm.weight.device, torch.promote_types(norm.weight.dtype, torch.float32))

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        """Norm sums `(…, D)`; computed in float32 at least, as LayerNorms do."""
        rows = total.to(self.basis.dtype)
        inside = (rows - rows.mean(-1, keepdim=True)) @ self.basis
        mean_square = inside.square().sum(-1, keepdim=True) / len(self.basis)
        normed = self.weight * ((inside * (mean_square + self.eps).rsqrt()) @ self.basis.T) + self.bias
        return normed.to(total.dtype)


def fold_post_norm(tensors: Tensors, stack: Stack, before: Tensors, bases: list[torch.Tensor]) -> Tensors:
    """Return a layer without norms, inside subspaces of the residual stream.

    Sublayer s reads coordinates in `bases[s] (D, d)` and writes coordinates in `bases[s + 1]`. With γ and β of the norm
    before it, readers become `W diag(γ) U` with bias `b + W β`. Writers become `U'ᵀ R W`. Their bias also takes what
    the stream brings along, `U'ᵀ R (b + β)`. The shortcut is `U'ᵀ R diag(γ) U`. Of a sublayer without heads or neurons,
    whose tensors are empty, only the writer's bias stays. Products are float64, results float32.

    Args:
        before: weight and bias of the norm that the layer reads from, after the layer before or the embeddings.
    """
    folded, norm = {name: tensor for name, tensor in tensors.items() if tensor.numel()}, before
    for index, sublayer in enumerate(stack.sublayers):
        basis, after = bases[index], bases[index + 1]
        gamma, beta = (as_like(norm[part], basis) for part in ("weight", "bias"))
        for linear in (reader for reader in sublayer.readers if f"{reader}.weight" in folded):
            weight = as_like(tensors[f"{linear}.weight"], basis)
            folded[f"{linear}.weight"] = (weight @ (gamma.unsqueeze(1) * basis)).float()
            folded[f"{linear}.bias"] = (as_like(tensors[f"{linear}.bias"], basis) + weight @ beta).float()
        writer, name = sublayer.writer, sublayer.norm.name
        centred = after - after.mean(0)  # Uᵀ R = (R U)ᵀ
        if f"{writer}.weight" in folded:
            folded[f"{writer}.weight"] = (centred.T @ as_like(tensors[f"{writer}.weight"], basis)).float()
        folded[f"{writer}.bias"] = (centred.T @ (as_like(tensors[f"{writer}.bias"], basis) + beta)).float()
        folded[f"{sublayer.shortcut}.weight"] = (centred.T @ (gamma.unsqueeze(1) * basis)).float()
        norm = {part: folded.pop(f"{name}.{part}") for part in ("weight", "bias")}
    return folded


def fold_table(table: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return `E R U (rows, d)` of an embedding whose sum a norm follows."""
    return times(without_mean(table), basis)


def fold_output(norm: Tensors, basis: torch.Tensor) -> Tensors:
    """Return the linear that leads from the last subspace back to D coordinates, `diag(γ) U n + β`."""
    gamma = as_like(norm["weight"], basis)
    return {"weight": (gamma.unsqueeze(1) * basis).to(norm["weight"]), "bias": norm["bias"]}


def fold_tied_head(embedding: torch.Tensor, basis: torch.Tensor) -> Tensors:
    """Return what makes a decoder tied to the embedding `E` of the stored `E R U`: the map `Uᵀ`, and the rows' means.

    `E h ≈ (E R U) (Uᵀ h) + means · Σ h`, exact if the rows without their means lie in the subspace.
    """
    return {"head_map": basis.T.to(embedding), "row_means": embedding.double().mean(1).to(embedding)}
