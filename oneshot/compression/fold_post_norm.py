"""A smaller hidden size where LayerNorms follow the sums (BERT): every position has a subspace of its own.

SP3 (equations 5 to 8, 17 and 18) writes `LayerNorm(z) = diag(γ) U n + β` with the state
`n = Uᵀ R z ÷ √(‖Uᵀ R z‖²/D + ε)`, where `R` subtracts the mean over the D coordinates and `U (D, d)` has orthonormal
columns. It is exact if the columns span what `R z` spans, so at full width. The compressed model stores `n`, and what
reads and writes it is folded here. `diag(γ)` commutes with no rotation, so every sublayer has a shortcut.

The first position is after the embeddings, and one follows every sublayer. All products are float64.
"""

import torch
from torch import nn

from oneshot.compression.fold import times
from oneshot.families import Stack
from oneshot.machine.transfer import as_like

Tensors = dict[str, torch.Tensor]


class SubspaceNorm(nn.Module):
    """`γ ⊙ (U Uᵀ R z ÷ √(‖Uᵀ R z‖²/D + ε)) + β`: a LayerNorm inside a subspace, in the model's own coordinates.

    It replaces a LayerNorm of a stock layer; the states are then those that the folded layer has (SP3 equation 8).

    Args:
        weight, bias: γ and β `(D,)` of the LayerNorm. eps: its ε. basis: `U (D, d)` with orthonormal columns.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float, basis: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.eps = eps
        self.basis: torch.Tensor
        precision = torch.promote_types(weight.dtype, torch.float32)
        self.register_buffer("basis", basis.to(weight.device).to(precision), persistent=False)

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        """Norm sums `(…, D)`; computed in float32 at least, returned in the dtype of the sums."""
        rows = total.to(self.basis.dtype)
        coordinates = (rows - rows.mean(-1, keepdim=True)) @ self.basis
        mean_square = coordinates.square().sum(-1, keepdim=True) / total.shape[-1]
        inside = (coordinates * torch.rsqrt(mean_square + self.eps)) @ self.basis.T
        return (inside * self.weight + self.bias).to(total.dtype)


def fold_post_norm(tensors: Tensors, stack: Stack, norm_before: Tensors, bases: list[torch.Tensor]) -> Tensors:
    """Return a layer in the coordinates of its subspaces, with a shortcut in every sublayer and without norms.

    Sublayer s reads position s with basis `U` and norm `γ, β`, and writes position s + 1 with basis `U'`. Readers
    become `W diag(γ) U` with the bias `b + W β`, the writer `U'ᵀ R W` with the bias `U'ᵀ R (b + β)`, and the shortcut
    is `U'ᵀ R diag(γ) U` (SP3 equation 18). Of a sublayer without columns only the writer's bias stays.

    Args:
        tensors: of the layer, under the family's names. norm_before: `weight` and `bias` of the norm at its position 0.
        bases: `(D, d)` float64, one for every sublayer and one more.

    Returns:
        float32 tensors of what was folded; others as they are.
    """
    folded = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    norm = norm_before
    for sublayer, basis, after in zip(stack.sublayers, bases, bases[1:], strict=False):
        state, shift = _as_read(norm, basis)
        for linear in sublayer.readers:
            read_through(folded, linear, state, shift)
        write_into(folded, sublayer.writer, without_mean(after), carried=shift)
        folded[f"{sublayer.shortcut}.weight"] = (without_mean(after).T @ state).float()
        norm = {part: folded.pop(f"{sublayer.norm.name}.{part}") for part in ("weight", "bias")}
    return folded


def fold_embeddings(tables: Tensors, basis: torch.Tensor) -> Tensors:
    """Return `E R U₀ (rows, d₀)` of every table, in the table's dtype; the norm after their sum goes to its readers.

    Args:
        tables: of tokens, positions and token types, each `(rows, D)`. basis: `U₀ (D, d₀)` float64.
    """
    return {name: times(table, without_mean(basis)) for name, table in tables.items()}


def fold_output(norm: Tensors, basis: torch.Tensor) -> Tensors:
    """Return the map from the last states to the dense model's hidden states, `diag(γ) U n + β`.

    It is `output_map.weight (D, d)` and `output_map.bias (D,)` in float32.
    """
    state, shift = _as_read(norm, basis)
    return {"output_map.weight": state.float(), "output_map.bias": shift.float()}


def fold_tied_head(embedding: torch.Tensor, basis: torch.Tensor) -> Tensors:
    """Return what lets a decoder use the folded embedding: `E h = (E R U₀) U₀ᵀ h + m 1ᵀ h` within the subspace.

    It is `head_map.weight = U₀ᵀ (d₀, D)` float32, and `row_means = m (vocabulary,)`, the mean of every row of E in its
    dtype.
    """
    means = embedding.double().mean(1).to(embedding.dtype)
    return {"head_map.weight": basis.T.contiguous().float(), "row_means": means}


def without_mean(basis: torch.Tensor) -> torch.Tensor:
    """Return `R U`: the columns `(D, d)` minus their means."""
    return basis - basis.mean(0)


def read_through(folded: Tensors, linear: str, state: torch.Tensor, shift: torch.Tensor) -> None:
    """Let a linear, if it is stored, read states `n` instead of `M n + c`: `W M` and `b + W c`; in place.

    Args:
        state: `M (D, d)` float64. shift: `c (D,)` float64.
    """
    if f"{linear}.weight" in folded:
        weight, bias = (as_like(folded[f"{linear}.{part}"], state) for part in ("weight", "bias"))
        folded[f"{linear}.weight"] = (weight @ state).float()
        folded[f"{linear}.bias"] = (bias + weight @ shift).float()


def write_into(folded: Tensors, linear: str, directions: torch.Tensor, carried: torch.Tensor | None = None) -> None:
    """Let a linear write coordinates along directions: `Vᵀ W` and `Vᵀ (b + carried)`; in place.

    Args:
        directions: `V (D, d)` float64. carried: `(D,)` float64, a constant of the residual stream; None for zero.
    """
    if f"{linear}.weight" in folded:
        folded[f"{linear}.weight"] = (directions.T @ as_like(folded[f"{linear}.weight"], directions)).float()
    bias = as_like(folded[f"{linear}.bias"], directions)
    folded[f"{linear}.bias"] = (directions.T @ (bias if carried is None else bias + carried)).float()


def _as_read(norm: Tensors, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `diag(γ) U (D, d)` and `β (D,)`, float64: what a LayerNorm makes of the states."""
    gamma, beta = (as_like(norm[part], basis) for part in ("weight", "bias"))
    return gamma.unsqueeze(1) * basis, beta
