"""TCSP's smaller hidden size for models with LayerNorms after the sums, a baseline (appendix D, equations 45 to 56).

One subspace `P (D, k)` serves the whole model, and ordinary LayerNorms run over its k coordinates:
`LayerNorm(z) ≈ γ P γ_n⁻¹ (n − β_n) + β` with the state `n = γ_n LayerNorm_k(Pᵀ z) + β_n`, `γ_n = diag(Pᵀ γ P)` and
`β_n = Pᵀ β`. The residual stream then needs no matrix, because `Pᵀ γ P γ_n⁻¹` counts as the identity. It does not equal
it, and the mean over k coordinates is not the mean over D, so this is **approximate even at full width**; the form of
`fold_post_norm` is exact there. The first layer stays whole, as in the paper, and ends with one matrix to the k
coordinates.

No norm in the model's own coordinates has the same states: sublayers read `γ P γ_n⁻¹ (n − β_n) + β` while the residual
stream carries `P n`.
"""

import torch

from oneshot.families import Stack
from oneshot.machine.transfer import as_like
from oneshot.tensors import Tensors


def fold_diagonal(
    tensors: Tensors, stack: Stack, norm_before: Tensors | None, basis: torch.Tensor, *, rescaled: bool
) -> Tensors:
    """Return a layer in the k coordinates of the subspace (TCSP equations 52 to 56).

    Readers become `W γ P γ_n⁻¹` with the bias `b + W (β − γ P γ_n⁻¹ Pᵀ β)`, writers `Pᵀ W` and `Pᵀ b`, and norms `γ_n`
    and `β_n`. Of the first layer only the last sublayer's output changes, and its shortcut is `Pᵀ`.

    Args:
        tensors: the layer's, under the family's names. basis: `P (D, k)` float64 with orthonormal columns.
        norm_before: `weight` and `bias` of the norm before the layer; None for the first layer.
        rescaled: multiply the norms by `√(D/k)`. The paper does not, although a LayerNorm over k coordinates divides by
            a root mean square that is larger by this factor.

    Returns:
        float32 tensors of what was folded; others as they are.
    """
    folded, norm, last = dict(tensors), norm_before, stack.sublayers[-1]
    for sublayer in stack.sublayers if norm_before is not None else [last]:
        if norm is not None:
            state, shift = _as_read(norm, basis)
            for linear in sublayer.readers:
                weight, bias = (as_like(tensors[f"{linear}.{part}"], basis) for part in ("weight", "bias"))
                folded[f"{linear}.weight"] = (weight @ state).float()
                folded[f"{linear}.bias"] = (bias + weight @ shift).float()
        for part in ("weight", "bias"):
            writer = f"{sublayer.writer}.{part}"
            folded[writer] = (basis.T @ as_like(tensors[writer], basis)).float()
        name = sublayer.norm.name
        norm = {part: tensors[f"{name}.{part}"] for part in ("weight", "bias")}
        scale = (basis.shape[0] / basis.shape[1]) ** 0.5 if rescaled else 1.0
        folded[f"{name}.weight"] = (scale * _diagonal(norm, basis)).float()
        folded[f"{name}.bias"] = (basis.T @ as_like(norm["bias"], basis)).float()
    if norm_before is None:
        folded[f"{last.shortcut}.weight"] = basis.T.contiguous().float()
    return folded


def fold_diagonal_output(norm: Tensors, basis: torch.Tensor) -> Tensors:
    """Return the map from the last states to the dense model's hidden states (TCSP equation 50), float32.

    Its `weight` is `γ P γ_n⁻¹ (D, k)`, its `bias` is `β − γ P γ_n⁻¹ Pᵀ β (D,)`.
    """
    state, shift = _as_read(norm, basis)
    return {"weight": state.float(), "bias": shift.float()}


def _diagonal(norm: Tensors, basis: torch.Tensor) -> torch.Tensor:
    """Return `diag(Pᵀ γ P) (k,)` float64."""
    return basis.square().T @ as_like(norm["weight"], basis)


def _as_read(norm: Tensors, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `γ P γ_n⁻¹ (D, k)` and `β − γ P γ_n⁻¹ Pᵀ β (D,)`, float64: what sublayers read of the states."""
    gamma, beta = (as_like(norm[part], basis) for part in ("weight", "bias"))
    state = gamma.unsqueeze(1) * basis / _diagonal(norm, basis)
    return state, beta - state @ (basis.T @ beta)
