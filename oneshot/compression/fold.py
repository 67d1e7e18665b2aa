"""From factors to the tensors of a smaller layer. Names are the family's own; untouched tensors pass through."""

from dataclasses import dataclass

import torch

from oneshot.architecture import Attention, ModelShape, Stack, Sublayer, cut
from oneshot.compression.correction import Factors
from oneshot.linalg.products import rounded_product
from oneshot.machine.transfer import as_like
from oneshot.tensors import Tensors

PANEL_ROWS = 2048  # of an embedding; glibc takes what has 32 MiB or more anew from the system


def augmented_weight(tensors: Tensors, linear: str) -> torch.Tensor:
    """Return `[W, b] (d, n + 1)` of a linear with a bias, `W (d, n)` of one without."""
    weight = tensors[f"{linear}.weight"]
    bias = tensors.get(f"{linear}.bias")
    return weight if bias is None else torch.cat((weight, bias.unsqueeze(1)), dim=1)


def row_energy(tensors: Tensors, *linears: str) -> torch.Tensor:
    """Return the squared norms of the rows, summed over linears with equally many rows; float32."""
    return torch.stack([tensors[f"{linear}.weight"].float().square().sum(1) for linear in linears]).sum(0)


def head_columns(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the columns of whole heads: int64 `(len(heads) · head_dim,)`."""
    return (heads.unsqueeze(1) * head_dim + torch.arange(head_dim, device=heads.device)).flatten()


def fold_sublayer(tensors: Tensors, sublayer: Sublayer, shape: ModelShape, factors: Factors) -> Tensors:
    """Return the layer with the kept columns of a sublayer; the correction goes into its writer (STAT section 3.1).

    A layer with fixed heads keeps all of them: the writer ignores the others, which `cut_heads` removes at the end.
    """
    folded, writer, mixer = dict(tensors), sublayer.writer, sublayer.mixer
    weight = tensors[f"{writer}.weight"]
    columns = factors.kept_columns
    if f"{writer}.bias" in tensors:
        columns = columns[:-1]  # without the constant column
    corrected = as_like(factors.weight[:, : len(columns)], weight)
    if isinstance(mixer, Attention) and mixer.fixed_heads:
        silent = corrected.new_zeros(weight.shape)
        silent[:, columns.to(silent.device)] = corrected
        folded[f"{writer}.weight"] = silent
    else:
        others = {name: tensor for name, tensor in tensors.items() if name != f"{writer}.weight"}
        folded |= with_columns(others, sublayer, shape, columns)
        folded[f"{writer}.weight"] = corrected
    if f"{writer}.bias" in tensors:
        bias = tensors[f"{writer}.bias"]
        folded[f"{writer}.bias"] = as_like(factors.weight[:, len(columns)], bias)
    return folded


def with_columns(tensors: Tensors, sublayer: Sublayer, shape: ModelShape, columns: torch.Tensor) -> Tensors:
    """Return the tensors beside a writer with only what makes these of its columns, of attention whole heads."""
    mixer = sublayer.mixer
    if isinstance(mixer, Attention):
        return cut_heads(tensors, mixer, shape, columns[:: shape.head_dim] // shape.head_dim)
    return cut(tensors, mixer.axes(shape), {"neurons": columns})


def cut_heads(tensors: Tensors, attention: Attention, shape: ModelShape, heads: torch.Tensor) -> Tensors:
    """Return the layer with only the query heads `heads` (ascending) and their KV groups; the others do nothing."""
    kept = {"heads": heads, "groups": (heads // shape.heads_per_group).unique()}
    return cut(tensors, attention.axes(shape), kept, {"key": shape.head_dim, "value": shape.head_dim})


def without_sublayer(tensors: Tensors, sublayer: Sublayer) -> Tensors:
    """Return the layer without a sublayer's linears and norms."""
    gone = {*sublayer.readers, sublayer.writer, *(norm.name for norm in sublayer.norms), *sublayer.mixer.own_norms}
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in gone}


def confine(tensors: Tensors, linear: str, basis: torch.Tensor) -> Tensors:
    """Return the layer with `P Pᵀ W` for a writer, float32, so that its output stays in the subspace."""
    confined = dict(tensors)
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in tensors:
            confined[name] = (basis @ (basis.T @ as_like(tensors[name], basis))).float()
    return confined


def fold_hidden(
    tensors: Tensors, stack: Stack, bases: list[torch.Tensor], memory: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Tensors:
    """Return a layer with RMSNorms inside subspaces of the residual stream (TCSP section 4; SP3 equation 34).

    Sublayer s reads coordinates in `bases[s] (D, d)` and writes coordinates in `bases[s + 1]`. Inputs become
    `√(D/d) W diag(γ) P` and outputs `Pᵀ W`, and the norms' own weights become ones. A stock RMSNorm over d coordinates
    divides by their root mean square. The factor, and `rms_norm_eps · D/d` in the config, make it the division by the
    root mean square over the original width. If two neighbouring subspaces differ (are not one object), a shortcut
    `P_nextᵀ P` carries the stream over. Products are float64, results float32.

    Args:
        memory: the weight of the encoder's final norm and the basis that it reads, which the keys and values of
            cross-attention take in as others take their own norm (SP3 equations 57, 58); None without one.
    """
    folded = dict(tensors)
    for index, sublayer in enumerate(stack.sublayers):
        basis, after, norm = bases[index], bases[index + 1], sublayer.norm.name
        for linear in sublayer.readers:
            name = f"{linear}.weight"
            folded[name] = project_input(tensors[name].float(), tensors[f"{norm}.weight"], basis)
        for linear in sublayer.mixer.memory_readers:
            assert memory is not None
            folded[f"{linear}.weight"] = project_input(tensors[f"{linear}.weight"].float(), *memory)
        folded[f"{norm}.weight"] = tensors[f"{norm}.weight"].new_ones(basis.shape[1])
        for name in (f"{sublayer.writer}.weight", f"{sublayer.writer}.bias"):
            if name in tensors:
                folded[name] = (after.T @ as_like(tensors[name], after)).float()
        if after is not basis:
            folded[f"{sublayer.shortcut}.weight"] = (after.T @ basis).float()
    return folded


def fold_embedding(embedding: torch.Tensor, basis: torch.Tensor | None, *, centred: bool) -> torch.Tensor:
    """Return `E P (rows, d)` of a token or position embedding; `centred`: its rows first lose their mean."""
    if centred:
        embedding = without_mean(embedding)
    return embedding if basis is None else times(embedding, basis)


@dataclass(frozen=True)
class FoldedHead:
    """The final norm's weight, and the output head: its own weight, or a map to a tied embedding; and its bias."""

    norm: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    tied_map: torch.Tensor | None = None


def fold_head(
    head: torch.Tensor,
    norm: Tensors,
    bases: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    keep_tied: bool,
    scale: float = 1.0,
) -> FoldedHead:
    """Fold the final norm into the output head `(vocabulary, D)`.

    The head takes the norm's weight and the projection, `√(D/d) W diag(γ) P`. A tied head stays tied after the matrix
    `√(D/d) P₀ᵀ diag(γ) P`, which is exact in the embedding's subspace. A LayerNorm's bias becomes the head's bias.

    Args:
        norm: tensors of the final norm. bases: at the first and the last position, `P₀ (D, d₀)` and `P (D, d)`; None
            at full width. scale: factor of the states that a head of its own reads; the head absorbs it.
    """
    gamma, beta = norm["weight"], norm.get("bias")
    bias = None if beta is None else times(head, beta.double().unsqueeze(1)).squeeze(1)
    if bases is None:
        return FoldedHead(gamma, None if keep_tied else head, bias)
    first, last = bases
    ones = gamma.new_ones(last.shape[1])
    if keep_tied:
        return FoldedHead(ones, None, bias, as_like(project_input(first.T, gamma, last), head))
    return FoldedHead(ones, project_input(head, gamma.double() * scale, last), bias)


def to_rms_norms(tensors: Tensors, stack: Stack) -> Tensors:
    """Replace a layer's LayerNorms by RMSNorms, exactly (Jiang et al. 2023; SP3 appendix F.1).

    What the layer adds to the residual stream loses its mean. The embedding must have lost it before (`without_mean`),
    so the stream never has one. The norms' biases go into the linears that read them.
    """
    folded = dict(tensors)
    for sublayer in stack.sublayers:
        shift = folded.pop(f"{sublayer.norm.name}.bias").double()
        for linear in sublayer.readers:
            bias = tensors[f"{linear}.bias"]
            folded[f"{linear}.bias"] = (bias.double() + tensors[f"{linear}.weight"].double() @ shift).to(bias)
        writer = sublayer.writer
        folded[f"{writer}.weight"] = without_mean(tensors[f"{writer}.weight"].T).T.contiguous()
        folded[f"{writer}.bias"] = without_mean(tensors[f"{writer}.bias"].unsqueeze(0)).squeeze(0)
    return folded


def without_mean(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of the residual stream `(rows, D)` minus their own mean, which a LayerNorm ignores."""
    return torch.cat([(panel - panel.double().mean(1, keepdim=True)).to(rows) for panel in rows.split(PANEL_ROWS)])


def project_input(weight: torch.Tensor, norm: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return `√(D/d) W diag(γ) P`: a linear after a norm, for coordinates in the subspace."""
    scale = (basis.shape[0] / basis.shape[1]) ** 0.5
    return times(weight, scale * as_like(norm, basis).unsqueeze(1) * basis)


def times(weight: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return `weight @ matrix` in the weight's dtype and place, computed where the matrix is by `rounded_product`.

    By panels, because embeddings are large.
    """
    products = (
        rounded_product(panel.to(matrix.device), matrix, weight.dtype).to(weight.device)
        for panel in weight.split(PANEL_ROWS)
    )
    return torch.cat([*products])
