"""Rounding with error feedback: what rounding a column breaks is given to the columns that are rounded after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from oneshot.architecture import Mixer, Stack
from oneshot.checkpoint.quantisation import Quantisation
from oneshot.compression.correction import relative
from oneshot.compression.ranks import Factored, Ranks
from oneshot.linalg.psd import ridged_cholesky
from oneshot.machine.transfer import as_like
from oneshot.tensors import Tensors

DAMPING = 1e-2  # of the mean diagonal, as in GPTQ
TOKENS_PER_COLUMN = 4  # from which on products of inputs say more than their squares alone
BLOCK = 128  # columns between products of whole matrices
PANEL_ROWS = 4096  # that are rounded together, because that takes several times their bytes


@dataclass(frozen=True)
class RoundedWeight:
    """A weight that can be stored.

    Attributes:
        weight: `(m, n)`, in the dtype of the weight that was rounded. scales: see `Quantisation.scales`.
        energies: float64 `(m, 2)`: of the errors and of the outputs, row by row.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    energies: torch.Tensor


def rounded(weight: torch.Tensor, gram: torch.Tensor, num_tokens: float, quantisation: Quantisation) -> RoundedWeight:
    """Return a weight that can be stored, close to `weight (m, n)` by its outputs.

    With `G = U D Uᵀ`, U unit upper triangular, errors `E = W − Q` cost `tr(E G Eᵀ) = Σ_k D_k ‖E_k + E_{<k} U_{<k,k}‖²`.
    So column k is rounded from `W_k + E_{<k} U_{<k,k}` (Chee et al. 2023, QuIP, arXiv 2307.13304, section 3). That is
    GPTQ's update (Frantar et al. 2023, arXiv 2210.17323) without an inverse, by theorem 6 of QuIP. Scales are chosen
    before. Columns with much energy come first, while many others can still make up for them.

    A row that the nearest weights suit better gets these.

    Args:
        gram: `G (n, n)` of what the linear reads. num_tokens: tokens in its sums.
    """
    order = gram.diagonal().argsort(stable=True).flip(0)
    factor = feedback_factor(gram, num_tokens, order)
    feedback = None if factor is None else factor / factor.diagonal()
    panels = [_rounded_rows(panel.double(), gram, order, feedback, quantisation) for panel in weight.split(PANEL_ROWS)]
    stored, scales, energies = (torch.cat(parts) for parts in zip(*panels, strict=True))
    return RoundedWeight(stored.to(weight.dtype), scales, energies)


def feedback_factor(gram: torch.Tensor, num_tokens: float, order: torch.Tensor) -> torch.Tensor | None:
    """Return upper triangular `U (n, n)` float64 with `U Uᵀ` the ridged Gram, its columns in an order of rounding.

    From few tokens the Gram has chance products, by which rounding would fit the text alone. So products of different
    columns count by the share `T / (T + 4 n)` of T tokens (benchmarks/records/experiments.md).

    Args:
        gram: `G (n, n)` of what a linear reads. num_tokens: tokens in its sums. order: int64 `(n,)`.

    Return None if the Gram is zero, because no token has reached the linear.
    """
    if not bool(gram.diagonal().any()):
        return None
    trusted = num_tokens / (num_tokens + TOKENS_PER_COLUMN * len(gram))
    shrunk = torch.diag(gram.diagonal()).lerp_(gram, trusted)
    found = ridged_cholesky(shrunk, DAMPING, of="inputs of a rounded linear", order=order.flip(0))
    assert found is not None  # there is a ridge
    return found[0].flip(0, 1)


def _rounded_rows(
    weight: torch.Tensor,
    gram: torch.Tensor,
    order: torch.Tensor,
    feedback: torch.Tensor | None,
    quantisation: Quantisation,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rounded rows, their scales and their energies; `feedback`: `U` in the order, None if G is zero."""
    scales = quantisation.scales(weight, gram.diagonal())
    steps = quantisation.steps(scales).expand(weight.shape)
    if feedback is None:
        return quantisation.nearest(weight, steps), scales, weight.new_zeros(len(weight), 2)
    targets, stored, errors = weight[:, order], torch.empty_like(weight), torch.zeros_like(weight)
    for start in range(0, len(order), BLOCK):
        block = targets[:, start : start + BLOCK] + errors[:, :start] @ feedback[:start, start : start + BLOCK]
        for column in range(start, start + block.shape[1]):
            wanted = block[:, column - start] + errors[:, start:column] @ feedback[start:column, column]
            own = quantisation.nearest(wanted, steps[:, order[column]])
            stored[:, order[column]] = own
            errors[:, column] = targets[:, column] - own
    nearest = quantisation.nearest(weight, steps)
    lost, lost_by_nearest, whole = (_energies(rows, gram) for rows in (weight - stored, weight - nearest, weight))
    stored = torch.where((lost <= lost_by_nearest).unsqueeze(1), stored, nearest)
    return stored, scales, torch.stack((torch.minimum(lost, lost_by_nearest), whole), dim=1)


def _energies(weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return `diag(W G Wᵀ) (m,)` float64."""
    return ((weight.to(gram) @ gram) * weight).sum(1, dtype=torch.float64)


def quantised_weights(stack: Stack, tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of the weights of a layer that are quantised, those together that read the same."""
    groups = [linears for one in stack.sublayers for linears in (one.readers, (one.writer,))]
    named = ([name for linear in linears if (name := f"{linear}.weight") in tensors] for linears in groups)
    return [names for names in named if names]


def round_others(quantisation: Quantisation, stack: Stack, tensors: Tensors, scales: Tensors) -> Tensors:
    """Return a layer as it is stored, in which linears without `scales` are rounded to the nearest, and get theirs."""
    stored = dict(tensors)
    for names in quantised_weights(stack, tensors):
        others = [name for name in names if name not in scales]
        if others and quantisation.has_global_scale:
            others = names  # which have one global scale
        if others:
            quantisation = quantisation.for_weights(tensors[name] for name in others)
        for name in others:
            scales[name] = quantisation.scales(tensors[name])
            nearest = quantisation.nearest(tensors[name].double(), quantisation.steps(scales[name]))
            stored[name] = nearest.to(tensors[name].dtype)
    return stored


@dataclass(frozen=True)
class RoundedColumns(Factored):
    """A matrix of low rank whose stored columns are rounded; `order` as `Factored.columns` returns it."""

    order: torch.Tensor

    def rows(self, kept: torch.Tensor) -> "RoundedColumns":
        """Return the matrix of these rows."""
        return RoundedColumns(self.outputs[kept], self.inputs, self.order)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rounded columns, what makes the others from them, and the order of both."""
        return self.outputs, self.inputs[:, self.order[len(self.inputs) :]].T, self.order


@dataclass(frozen=True)
class Rounded:
    """Rounded linears of a sublayer.

    Attributes:
        weights: of whole linears, by name. scales: of all, by the name of the weight. ranks: of linears of low rank.
        errors: relative Frobenius errors of the outputs on the text, by the name of the linear.
    """

    weights: Tensors = field(default_factory=dict)
    scales: Tensors = field(default_factory=dict)
    ranks: Ranks = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def round_linears(
    mixer: Mixer,
    linears: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    ranks: Ranks,
    gram: torch.Tensor,
    num_tokens: float,
    quantisation: Quantisation,
) -> Rounded:
    """Round linears that read the same; of a low rank only the columns that are stored as a linear.

    Args:
        linears: names. tensors, ranks: the layer's, and the sublayer's. gram, num_tokens: see `rounded`.
    """
    found = Rounded()
    of_kinds = {kind: ranks[kind] for kind, names in mixer.ranked.items() if kind in ranks and names[0] in linears}
    whole = [name for name in linears if not any(name in mixer.ranked[kind] for kind in of_kinds)]
    columns = [factored.columns()[0] for factored in of_kinds.values()]
    quantisation = quantisation.for_weights([*columns, *(tensors[f"{name}.weight"] for name in whole)])
    for kind, factored in of_kinds.items():
        names = mixer.ranked[kind]
        sizes = [len(tensors[f"{name}.weight"]) for name in names]
        found.ranks[kind] = _round_columns(found, names, sizes, factored, gram, num_tokens, quantisation)
    if whole:
        weights = [tensors[f"{name}.weight"].to(gram.device) for name in whole]
        sizes = [*map(len, weights)]
        stored = _round_together(found, whole, torch.cat(weights), sizes, gram, num_tokens, quantisation)
        for name, part in zip(whole, stored.split(sizes), strict=True):
            found.weights[f"{name}.weight"] = as_like(part, tensors[f"{name}.weight"])
    return found


def _round_columns(
    found: Rounded,
    names: Sequence[str],
    sizes: Sequence[int],
    factored: Factored,
    gram: torch.Tensor,
    num_tokens: float,
    quantisation: Quantisation,
) -> RoundedColumns:
    """Round the columns that are stored of a matrix of low rank, which reads the others through them."""
    columns, others, order = factored.columns()
    rank = columns.shape[1]
    inputs = torch.cat((torch.eye(rank).to(others), others.T), dim=1)[:, order.argsort()]
    of_columns = (inputs @ gram.to(inputs) @ inputs.T).to(gram)
    stored = _round_together(found, names, columns, sizes, of_columns, num_tokens, quantisation)
    return RoundedColumns(stored.to(columns), inputs, order)


def _round_together(
    found: Rounded,
    names: Sequence[str],
    weight: torch.Tensor,
    sizes: Sequence[int],
    gram: torch.Tensor,
    num_tokens: float,
    quantisation: Quantisation,
) -> torch.Tensor:
    """Round the rows `(m, n)` of linears that read the same, and note scales and errors."""
    together = rounded(weight, gram, num_tokens, quantisation)
    scales, energies = (one.split(list(sizes)) for one in (together.scales, together.energies))
    for name, own_scales, own_energies in zip(names, scales, energies, strict=True):
        found.scales[f"{name}.weight"] = own_scales
        found.errors[name] = relative(*own_energies.sum(0))
    return together.weight
