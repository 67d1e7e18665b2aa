"""Rounding with error feedback: what rounding a column breaks is given to the columns that are rounded after it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from oneshot.architecture import Mixer, Stack
from oneshot.checkpoint.quantisation import Quantisation
from oneshot.compression.correction import relative
from oneshot.compression.ranks import Factored, Ranks
from oneshot.linalg.interpolative import coefficients_of
from oneshot.linalg.pivoted_qr import weighted_pivots
from oneshot.linalg.psd import ridged_cholesky
from oneshot.machine.transfer import as_like
from oneshot.tensors import Tensors

DAMPING = 1e-2  # of the mean diagonal, as in GPTQ
TOKENS_PER_COLUMN = 4  # from which on products of inputs say more than their squares alone
FITS = 3  # of the columns of a low rank to what makes the other inputs of them, and the other way round
FIT_DAMPING = 1e-4  # of the columns' own Gram, in these fits
LARGEST_COEFFICIENT = 16.0  # of what makes the other inputs of a low rank from the pivots; 2.3 on a real model
BLOCK = 128  # columns between products of whole matrices
PANEL_ROWS = 4096  # that are rounded together, because that takes several times their bytes
StoredColumns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # as `Factored.columns` returns them


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
    found = ridged_cholesky(
        trusted_gram(gram, num_tokens), DAMPING, of="inputs of a rounded linear", order=order.flip(0)
    )
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
    _round_in_order_(stored, errors, targets, steps, order, feedback, quantisation)
    nearest = quantisation.nearest(weight, steps)
    lost, lost_by_nearest, whole = (row_energies(rows, gram) for rows in (weight - stored, weight - nearest, weight))
    stored = torch.where((lost <= lost_by_nearest).unsqueeze(1), stored, nearest)
    return stored, scales, torch.stack((torch.minimum(lost, lost_by_nearest), whole), dim=1)


def _round_in_order_(
    stored: torch.Tensor,
    errors: torch.Tensor,
    targets: torch.Tensor,
    steps: torch.Tensor,
    order: torch.Tensor,
    feedback: torch.Tensor,
    quantisation: Quantisation,
) -> None:
    """Fill what is stored of the `targets` (columns in the order), and what it lacks of each (in the order also)."""
    for start in range(0, len(order), BLOCK):
        block = targets[:, start : start + BLOCK] + errors[:, :start] @ feedback[:start, start : start + BLOCK]
        for column in range(start, start + block.shape[1]):
            wanted = block[:, column - start] + errors[:, start:column] @ feedback[start:column, column]
            own = quantisation.nearest(wanted, steps[:, order[column]])
            stored[:, order[column]] = own
            errors[:, column] = targets[:, column] - own


def row_energies(weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
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
    ways = {
        kind: columns_to_round(factored) if quantisation.group else [factored.columns()]
        for kind, factored in of_kinds.items()
    }
    columns = [way[0] for of_kind in ways.values() for way in of_kind]
    quantisation = quantisation.for_weights([*columns, *(tensors[f"{name}.weight"] for name in whole)])
    for kind, of_kind in ways.items():
        names = mixer.ranked[kind]
        sizes = [len(tensors[f"{name}.weight"]) for name in names]
        found.ranks[kind] = _round_columns(found, names, sizes, of_kind, gram, num_tokens, quantisation)
    if whole:
        weights = [tensors[f"{name}.weight"].to(gram.device) for name in whole]
        sizes = [*map(len, weights)]
        together = rounded(torch.cat(weights), gram, num_tokens, quantisation)
        _note(found, whole, sizes, together)
        for name, part in zip(whole, together.weight.split(sizes), strict=True):
            found.weights[f"{name}.weight"] = as_like(part, tensors[f"{name}.weight"])
    return found


def order_for_groups(weight: torch.Tensor) -> torch.Tensor:
    """Return the columns `(n,)` by falling norms, so that a scale is shared by columns of nearly the same size."""
    return weight.double().norm(dim=0).argsort(descending=True, stable=True)


def columns_to_round(factored: Factored) -> list[StoredColumns]:
    """Return ways to store a matrix of low rank, which differ in what rounding loses.

    One is `Factored.columns`. With error feedback and steps in proportion to the norms of columns, the mean logarithm
    of the errors grows with `Π ‖C_j‖² / det CᵀC`, which is least for orthogonal columns (Hadamard). So the other way
    has the pivots of the columns divided by their norms, unless these make large coefficients. In both the columns have
    the order for groups.
    """
    outputs, inputs = factored.outputs.double(), factored.inputs.double()
    seen = torch.linalg.qr(outputs, mode="r").R @ inputs  # its columns have the products of the matrix's
    norms = seen.norm(dim=0)
    pivots = weighted_pivots(seen.T @ seen, torch.where(norms > 0, 1 / norms, 0.0), rank=len(inputs))
    rest, coefficients = coefficients_of(inputs, pivots)
    ways = [factored.columns()]
    if bool((coefficients.abs() <= LARGEST_COEFFICIENT).all()):  # and finite
        columns, others = (outputs @ inputs[:, pivots]).to(factored.outputs), coefficients.T.to(factored.inputs)
        ways.append((columns, others, torch.cat((pivots, rest))))
    return [_in_order_for_groups(*way) for way in ways]


def _in_order_for_groups(columns: torch.Tensor, others: torch.Tensor, order: torch.Tensor) -> StoredColumns:
    by_norm = order_for_groups(columns)
    read, made = order.split([len(by_norm), len(others)])
    return columns[:, by_norm], others[:, by_norm], torch.cat((read[by_norm], made))


def _round_columns(
    found: Rounded,
    names: Sequence[str],
    sizes: Sequence[int],
    ways: Sequence[StoredColumns],
    gram: torch.Tensor,
    num_tokens: float,
    quantisation: Quantisation,
) -> RoundedColumns:
    """Round the columns that are stored of a matrix of low rank, which reads the others through them.

    What makes the others is not rounded. So it is fitted to the rounded columns, columns are fitted to it and rounded
    anew, and so on; the pair with the least error stays. Of the `ways` to store the matrix, that one is taken whose
    columns lose least before the fits. All is in float64, because what is lost is a small difference of large products.
    """
    dtype = ways[0][0].dtype
    exact = ((columns.double(), others.double(), order) for columns, others, order in ways)

    def rounded_at_once(way: StoredColumns) -> tuple[StoredColumns, torch.Tensor, RoundedWeight]:
        columns, others, order = way
        made = _making_all(others)
        ordered = gram[order.unsqueeze(1), order].to(made)
        return way, ordered, rounded(columns, made @ ordered @ made.T, num_tokens, quantisation)

    tried = map(rounded_at_once, exact)  # one after the other: a Gram is large
    (columns, others, order), ordered, of_columns = min(tried, key=lambda one: float(one[2].energies[:, 0].sum()))
    goal, start = columns, _making_all(others)
    made, known, least = start, trusted_gram(ordered, num_tokens), math.inf
    best: tuple[torch.Tensor, RoundedWeight] | None = None
    for step in range(FITS):
        if step:
            columns = columns + _better_columns(columns, made, goal, start, known)
            of_columns = rounded(columns, made @ ordered @ made.T, num_tokens, quantisation)
        columns = of_columns.weight
        for fitted in (made, _better_inputs(columns, made, goal, start, known)):
            made = fitted
            lost = float(_differences(columns, made, goal, start, known).sum())
            if lost < least or best is None:
                best, least = (made, of_columns), lost
    assert best is not None
    made, of_columns = best
    energies = (
        _differences(of_columns.weight, made, goal, start, ordered),
        row_energies(goal, start @ ordered @ start.T),
    )
    _note(found, names, sizes, replace(of_columns, energies=torch.stack(energies, dim=1)))
    return RoundedColumns(of_columns.weight.to(dtype), made[:, order.argsort()].to(dtype), order)


def _making_all(others: torch.Tensor) -> torch.Tensor:
    """Return `[I, T] (r, n)`, which makes all inputs; `others`: `Tᵀ`."""
    return torch.cat((torch.eye(others.shape[1]).to(others), others.T), dim=1)


def _differences(
    columns: torch.Tensor, made: torch.Tensor, goal: torch.Tensor, start: torch.Tensor, gram: torch.Tensor
) -> torch.Tensor:
    """Return the energies of the rows of `C₀ M₀ − C M (m, n)`, where inputs have this Gram."""
    inputs = torch.cat((start, made))
    return row_energies(torch.cat((goal, -columns), dim=1), inputs @ gram @ inputs.T)


def _better_columns(
    columns: torch.Tensor, made: torch.Tensor, goal: torch.Tensor, start: torch.Tensor, gram: torch.Tensor
) -> torch.Tensor:
    """Return what to add to columns `C`, so that `C M` is near to `C₀ M₀` where inputs have this Gram."""
    seen = gram @ made.T
    slope = goal @ (start @ seen) - columns @ (made @ seen)
    return _divided(slope, made @ seen, FIT_DAMPING)


def _better_inputs(
    columns: torch.Tensor, made: torch.Tensor, goal: torch.Tensor, start: torch.Tensor, gram: torch.Tensor
) -> torch.Tensor:
    """Return `M`, whose first columns are the unit matrix, changed so that `C M` is near to `C₀ M₀`."""
    rank, square = len(made), columns.T @ columns
    slope = ((columns.T @ goal) @ (start @ gram) - square @ (made @ gram))[:, rank:]
    change = _divided(_divided(slope, gram[rank:, rank:], DAMPING).T, square, FIT_DAMPING).T
    return torch.cat((made[:, :rank], made[:, rank:] + change), dim=1)


def _divided(rows: torch.Tensor, gram: torch.Tensor, damping: float) -> torch.Tensor:
    """Return `rows (m, n)` times the inverse of a ridged Gram; zeros if no token, or no weight, is in the Gram."""
    if not bool(gram.diagonal().any()):
        return torch.zeros_like(rows)
    found = ridged_cholesky(gram, damping, of="a rounded linear of low rank")
    assert found is not None  # there is a ridge
    return torch.cholesky_solve(rows.T.to(found[0]), found[0]).T.to(rows)


def trusted_gram(gram: torch.Tensor, num_tokens: float) -> torch.Tensor:
    """Return `G (n, n)` with as much of the products of different columns as so many tokens know."""
    trusted = num_tokens / (num_tokens + TOKENS_PER_COLUMN * len(gram))
    return torch.diag(gram.diagonal()).lerp_(gram, trusted)


def _note(found: Rounded, names: Sequence[str], sizes: Sequence[int], together: RoundedWeight) -> None:
    """Note scales and errors of linears that read the same, whose rows were rounded together."""
    scales, energies = (one.split(list(sizes)) for one in (together.scales, together.energies))
    for name, own_scales, own_energies in zip(names, scales, energies, strict=True):
        found.scales[f"{name}.weight"] = own_scales
        found.errors[name] = relative(*own_energies.sum(0))
