"""Factors -> the tensors of a smaller layer. Names are the family's own; untouched tensors pass through as they are."""

import torch

from oneshot.arch.base import (
    ATTENTION_NORM,
    DOWN_PROJ,
    FFN_NORM,
    GATE_PROJ,
    K_PROJ,
    O_PROJ,
    Q_PROJ,
    UP_PROJ,
    V_PROJ,
)
from oneshot.records import Factors

Tensors = dict[str, torch.Tensor]

PANEL_ROWS = 8192


def augmented_weight(tensors: Tensors, linear: str) -> torch.Tensor:
    """`[W, b] (d, n + 1)` of a linear with a bias, `W (d, n)` of one without."""
    weight = tensors[f"{linear}.weight"]
    bias = tensors.get(f"{linear}.bias")
    return weight if bias is None else torch.cat((weight, bias.unsqueeze(1)), dim=1)


def fold_ffn(tensors: Tensors, factors: Factors) -> Tensors:
    """Keep the FFN neurons `factors.kept`; the correction goes into `down_proj` (METHODS section 2)."""
    folded = dict(tensors)
    neurons = _columns_of(tensors, DOWN_PROJ, factors)
    for linear in (GATE_PROJ, UP_PROJ):
        _keep_rows_(folded, linear, neurons)
    _set_consumer_(folded, DOWN_PROJ, factors)
    return folded


def fold_heads(
    tensors: Tensors, factors: Factors, *, heads: torch.Tensor, heads_per_group: int, head_dim: int
) -> Tensors:
    """Keep the query heads `heads` (ascending) and the KV groups they use; the correction goes into `o_proj`."""
    folded = dict(tensors)
    groups = (heads // heads_per_group).unique()
    _keep_rows_(folded, Q_PROJ, head_columns(heads, head_dim))
    for linear in (K_PROJ, V_PROJ):
        _keep_rows_(folded, linear, head_columns(groups, head_dim))
    _set_consumer_(folded, O_PROJ, factors)
    return folded


def fold_hidden(tensors: Tensors, basis: torch.Tensor) -> Tensors:
    """The layer inside the subspace `basis` = `P (D, d)` of the residual stream (TCSP section 4; METHODS section 5).

    Inputs become `√(D/d) W diag(γ) P` and outputs `Pᵀ W`; the norms' own weights become ones. A stock RMSNorm over the
    d coordinates divides by their root mean square; the factor, and `rms_norm_eps · D/d` in the config, make that the
    division by the root mean square over the original width. Products in float64, the stored dtype is kept.
    """
    folded = dict(tensors)
    for norm, linears in ((ATTENTION_NORM, (Q_PROJ, K_PROJ, V_PROJ)), (FFN_NORM, (GATE_PROJ, UP_PROJ))):
        for linear in linears:
            name = f"{linear}.weight"
            folded[name] = project_input(tensors[name], tensors[f"{norm}.weight"], basis)
        folded[f"{norm}.weight"] = tensors[f"{norm}.weight"].new_ones(basis.shape[1])
    for linear in (O_PROJ, DOWN_PROJ):
        for name in (f"{linear}.weight", f"{linear}.bias"):
            if name in tensors:
                folded[name] = (basis.T @ tensors[name].to(basis)).to(tensors[name])
    return folded


def project_input(weight: torch.Tensor, norm: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """`√(D/d) W diag(γ) P`: a linear that reads a norm's output, for coordinates in the subspace."""
    scale = (basis.shape[0] / basis.shape[1]) ** 0.5
    return times(weight, scale * norm.to(basis).unsqueeze(1) * basis)


def times(weight: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`weight @ matrix` in the matrix's float64 but in the weight's dtype, a panel of rows at a time: an embedding is
    large.
    """
    return torch.cat([(panel.to(matrix) @ matrix).to(weight) for panel in weight.split(PANEL_ROWS)])


def head_columns(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The columns that whole heads take: int64 `(len(heads) · head_dim,)`."""
    return (heads.unsqueeze(1) * head_dim + torch.arange(head_dim, device=heads.device)).flatten()


def _columns_of(tensors: Tensors, linear: str, factors: Factors) -> torch.Tensor:
    """The kept columns without the constant one."""
    width = tensors[f"{linear}.weight"].shape[1]
    return factors.kept[factors.kept < width]


def _keep_rows_(tensors: Tensors, linear: str, rows: torch.Tensor) -> None:
    for part in ("weight", "bias"):
        name = f"{linear}.{part}"
        if name in tensors:
            tensors[name] = tensors[name][rows.to(tensors[name].device)]


def _set_consumer_(tensors: Tensors, linear: str, factors: Factors) -> None:
    weight = tensors[f"{linear}.weight"]
    num_columns = len(_columns_of(tensors, linear, factors))
    tensors[f"{linear}.weight"] = factors.weight[:, :num_columns].to(weight)
    if f"{linear}.bias" in tensors:
        bias = tensors[f"{linear}.bias"]
        tensors[f"{linear}.bias"] = factors.weight[:, num_columns].to(bias)
