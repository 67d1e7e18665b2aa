"""Factors -> the tensors of a smaller layer. Names are the family's own; untouched tensors pass through as they are."""

from dataclasses import dataclass

import torch

from oneshot.arch.base import (
    ATTENTION_NORM,
    ATTENTION_SHORTCUT,
    DOWN_PROJ,
    FFN_NORM,
    FFN_SHORTCUT,
    GATE_PROJ,
    K_PROJ,
    O_PROJ,
    Q_PROJ,
    ROTARY_PAIRS,
    UP_PROJ,
    V_PROJ,
)
from oneshot.records import Factors

Tensors = dict[str, torch.Tensor]

PANEL_ROWS = 8192

# Names outside the layers, Llama's and those of the per-layer form
FINAL_NORM = "model.norm.weight"
OUTPUT_HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
HEAD_MAP = "model.head_map.weight"


def augmented_weight(tensors: Tensors, linear: str) -> torch.Tensor:
    """`[W, b] (d, n + 1)` of a linear with a bias, `W (d, n)` of one without."""
    weight = tensors[f"{linear}.weight"]
    bias = tensors.get(f"{linear}.bias")
    return weight if bias is None else torch.cat((weight, bias.unsqueeze(1)), dim=1)


def row_energy(tensors: Tensors, *linears: str) -> torch.Tensor:
    """Squared norms of the rows, summed over the linears that are there (equally many rows each); float32."""
    weights = [tensors[f"{linear}.weight"] for linear in linears if f"{linear}.weight" in tensors]
    return torch.stack([weight.float().square().sum(1) for weight in weights]).sum(0)


def fold_ffn(tensors: Tensors, factors: Factors) -> Tensors:
    """Keep the FFN neurons `factors.kept`; the correction goes into `down_proj` (METHODS section 2)."""
    folded = dict(tensors)
    neurons = _columns_of(tensors, DOWN_PROJ, factors)
    for linear in (GATE_PROJ, UP_PROJ):  # a model without gate has none to shrink
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


@dataclass(frozen=True)
class InnerMaps:
    """What becomes of queries, keys and values inside the heads.

    Attributes:
        queries, keys: `(H, k, h)` and `(G, k, h)`: `q' = M q` and `k' = M k` head by head; or None. Rows of the
            identity where whole rotary pairs are kept.
        values: `(G, h, v)` with orthonormal columns: `v' = v Q`; or None.
        rotary_pairs: int64 `(G, k / 2)`: the pairs that each KV group keeps; or None.
    """

    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    rotary_pairs: torch.Tensor | None = None


def keep_heads(maps: InnerMaps, heads: torch.Tensor, heads_per_group: int) -> InnerMaps:
    """The maps of the query heads `heads` (ascending) and of the KV groups they use."""
    groups = (heads // heads_per_group).unique()
    return InnerMaps(
        queries=None if maps.queries is None else maps.queries[heads],
        keys=None if maps.keys is None else maps.keys[groups],
        values=None if maps.values is None else maps.values[groups],
        rotary_pairs=None if maps.rotary_pairs is None else maps.rotary_pairs[groups],
    )


def fold_inner(tensors: Tensors, maps: InnerMaps) -> Tensors:
    """A layer that computes with full heads what smaller ones can hold -> the smaller linears (METHODS section 6).

    `o_proj` must ignore what lies outside the values' subspaces: its columns are rewritten for the coordinates inside.
    """
    folded = dict(tensors)
    for linear, maps_of_heads in ((Q_PROJ, maps.queries), (K_PROJ, maps.keys)):
        if maps_of_heads is not None:
            _map_rows_(folded, linear, maps_of_heads)
    if maps.values is not None:
        _map_rows_(folded, V_PROJ, maps.values.mT)
        weight = tensors[f"{O_PROJ}.weight"]
        groups, head_dim, _ = maps.values.shape
        heads = weight.shape[1] // head_dim
        basis = maps.values.repeat_interleave(heads // groups, dim=0)
        per_head = weight.to(basis).view(len(weight), heads, head_dim)
        folded[f"{O_PROJ}.weight"] = torch.einsum("dhi,hij->dhj", per_head, basis).flatten(1).to(weight)
    if maps.rotary_pairs is not None:
        folded[ROTARY_PAIRS] = maps.rotary_pairs
    return folded


def _map_rows_(tensors: Tensors, linear: str, maps: torch.Tensor) -> None:
    """Replace the rows of each head, `W_h <- M_h W_h`, for maps `(heads, k, h)`; biases, too."""
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in tensors:
            rows = tensors[name]
            per_head = rows.to(maps).view(maps.shape[0], maps.shape[2], -1)
            tensors[name] = (maps @ per_head).reshape(-1, *rows.shape[1:]).to(rows)


def confine(tensors: Tensors, linear: str, basis: torch.Tensor) -> Tensors:
    """`P Pᵀ W` for a linear that writes to the residual stream, float32: its output stays in the subspace."""
    confined = dict(tensors)
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in tensors:
            confined[name] = (basis @ (basis.T @ tensors[name].to(basis))).float()
    return confined


def fold_hidden(tensors: Tensors, attention: torch.Tensor, ffn: torch.Tensor, output: torch.Tensor) -> Tensors:
    """A layer with RMSNorms inside subspaces of the residual stream (TCSP section 4; SP3 equation 34).

    Attention reads coordinates in the subspace `attention (D, d₁)`, the FFN in `ffn (D, d₂)`, and the layer leaves them
    in `output (D, d₃)`. Inputs become `√(D/d) W diag(γ) P` and outputs `Pᵀ W`; the norms' own weights become ones. A
    stock RMSNorm over d coordinates divides by their root mean square; the factor, and `rms_norm_eps · D/d` in the
    config, make that the division by the root mean square over the original width. Where neighbouring subspaces
    differ (are not one object), a shortcut `P_nextᵀ P` carries the stream over. Products in float64, float32 results.
    """
    folded = dict(tensors)
    for norm, basis in ((ATTENTION_NORM, attention), (FFN_NORM, ffn)):
        for linear in _readers(tensors, norm):
            name = f"{linear}.weight"
            folded[name] = project_input(tensors[name].float(), tensors[f"{norm}.weight"], basis)
        folded[f"{norm}.weight"] = tensors[f"{norm}.weight"].new_ones(basis.shape[1])
    for linear, basis in ((O_PROJ, ffn), (DOWN_PROJ, output)):
        for name in (f"{linear}.weight", f"{linear}.bias"):
            if name in tensors:
                folded[name] = (basis.T @ tensors[name].to(basis)).float()
    if ffn is not attention:
        folded[f"{ATTENTION_SHORTCUT}.weight"] = (ffn.T @ attention).float()
    if output is not ffn:
        folded[f"{FFN_SHORTCUT}.weight"] = (output.T @ ffn).float()
    return folded


def fold_embedding(embedding: torch.Tensor, basis: torch.Tensor | None, *, centred: bool) -> torch.Tensor:
    """`E P (rows, d)` of a token or position embedding; `centred`: its rows lose their mean first (`to_rms_norms`)."""
    if centred:
        embedding = without_mean(embedding)
    return embedding if basis is None else times(embedding, basis)


def fold_head(
    head: torch.Tensor,
    norm: torch.Tensor,
    norm_bias: torch.Tensor | None,
    bases: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    keep_tied: bool,
) -> Tensors:
    """The last norm and the output head `(vocabulary, D)`, under Llama's names.

    The head takes the norm's weight and projection, `√(D/d) W diag(γ) P`; a tied one stays tied behind the matrix
    `√(D/d) P₀ᵀ diag(γ) P`, which is as good as the embedding's subspace is. A LayerNorm's bias becomes the head's.

    Args:
        bases: of the first and of the last position, `P₀ (D, d₀)` and `P (D, d)`; None at full width.
    """
    folded: Tensors = {}
    if norm_bias is not None:
        folded[HEAD_BIAS] = times(head, norm_bias.double().unsqueeze(1)).squeeze(1)
    if bases is None:
        return folded | {FINAL_NORM: norm} | ({} if keep_tied else {OUTPUT_HEAD: head})
    first, last = bases
    folded[FINAL_NORM] = norm.new_ones(last.shape[1])
    if keep_tied:
        folded[HEAD_MAP] = project_input(first.T, norm, last).to(head)
    else:
        folded[OUTPUT_HEAD] = project_input(head, norm, last)
    return folded


def to_rms_norms(tensors: Tensors) -> Tensors:
    """A layer with LayerNorms -> the same layer with RMSNorms, exactly (Jiang et al. 2023; SP3 appendix F.1).

    What the layer adds to the residual stream loses its mean, so that the stream, whose embedding must have lost it
    (`without_mean`), never has one; the norms' biases go into the linears behind them.
    """
    folded = dict(tensors)
    for norm in (ATTENTION_NORM, FFN_NORM):
        shift = folded.pop(f"{norm}.bias").double()
        for linear in _readers(tensors, norm):
            bias = tensors[f"{linear}.bias"]
            folded[f"{linear}.bias"] = (bias.double() + tensors[f"{linear}.weight"].double() @ shift).to(bias)
    for linear in (O_PROJ, DOWN_PROJ):
        weight = tensors[f"{linear}.weight"]
        folded[f"{linear}.weight"] = without_mean(weight.T).T.contiguous()
        folded[f"{linear}.bias"] = without_mean(tensors[f"{linear}.bias"].unsqueeze(0)).squeeze(0)
    return folded


def without_mean(rows: torch.Tensor) -> torch.Tensor:
    """Rows of the residual stream `(rows, D)` less their own mean, which a LayerNorm does not see."""
    return torch.cat([(panel - panel.double().mean(1, keepdim=True)).to(rows) for panel in rows.split(PANEL_ROWS)])


def _readers(tensors: Tensors, norm: str) -> tuple[str, ...]:
    """The linears that read a norm's output; a model without gate has only `up_proj` behind its second."""
    linears = {ATTENTION_NORM: (Q_PROJ, K_PROJ, V_PROJ), FFN_NORM: (GATE_PROJ, UP_PROJ)}[norm]
    return tuple(linear for linear in linears if f"{linear}.weight" in tensors)


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
