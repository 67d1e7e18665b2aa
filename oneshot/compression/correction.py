"""From weights, statistics and kept columns to the corrected linear. Pure functions."""

from dataclasses import dataclass, replace
from typing import assert_never

import torch
from oneshot_kernels import columns_without

from oneshot.compression.statistics import Statistics, towards_diagonal
from oneshot.linalg.interpolative import interpolate
from oneshot.linalg.products import product
from oneshot.linalg.psd import RidgeFactor
from oneshot.machine import ALONE, Workers
from oneshot.machine.sharing import Loads
from oneshot.method import Correction

ENERGY_PANEL = 512
DAMPINGS = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SHRINKAGES = (0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0)
ABOUT_EQUAL = 1.01  # times an error
DIRECTIONS = 128  # of an output, in which errors are compared
# costs of n columns: pivoted Cholesky, a sixth as fast as products, and a factor, ÷ n³; solves and errors, ÷ n² D
PIVOT_OPERATIONS, SOLVE_OPERATIONS = 2.5, 12.0


@dataclass(frozen=True)
class Factors:
    """The kept columns of a sublayer and the corrected linear that reads them.

    Attributes:
        kept_columns: int64, of the reading linear; ascending unless neurons are put in another order.
        weight: `(d, k)` float64, its corrected weight over those columns.
        predicted_error: relative Frobenius error of the sublayer's output from the statistics; None without them.
        condition_number: the ridged skeleton Gram's. max_interpolation: `max|T|`. Both None if nothing was solved.
        damping: damping of the ridge that was used, larger if rounding required it; None if nothing was solved.
        energies: float64 `(2,)`, of the error and of the output, whose root is the predicted error; None without them.
    """

    kept_columns: torch.Tensor
    weight: torch.Tensor
    predicted_error: float | None = None
    condition_number: float | None = None
    max_interpolation: float | None = None
    eigenvalue_fallback: bool = False
    damping: float | None = None
    energies: torch.Tensor | None = None


def cost_of_columns(outputs: int, size: int) -> float:
    """Return the cost of the curve of a writer `(outputs, size)`, or of its choice and correction.

    In operations of float32 products on a CPU.
    """
    return PIVOT_OPERATIONS * size**3 + SOLVE_OPERATIONS * size**2 * outputs


def correct(
    weight: torch.Tensor,
    kept_columns: torch.Tensor,
    statistics: Statistics | None,
    *,
    correction: Correction,
    damping: float,
    residual_weight: float = 1.0,
    reported: bool = True,
    judged: bool = True,
    shrinkage: float = 0.0,
) -> Factors:
    """Return the linear over the kept columns, `y ≈ A[:, kept_columns] weight'ᵀ`.

    Args:
        weight: `(d, n)`, with the bias as last column if `statistics` has a constant column.
        kept_columns: `(k,)` ascending columns.
        correction: `none` keeps `weight[:, kept_columns]`. `bias` adds to its last column, the bias, the mean
            contribution of the other columns (FLAP, arXiv 2312.11983: baseline bias compensation). `same-layer` solves
            `min ‖A Wᵀ − A[:, kept_columns] W'ᵀ‖² + λ‖W' − W[:, kept_columns]‖²` (STAT section 3.1), which is
            `W' = W Pᵀ` with the ridged interpolation matrix. `two-stream` has the target `A Wᵀ + ρ (Y − A Wᵀ)`, `Y` the
            dense stream's next hidden state less this stream's residual, `ρ = residual_weight`.
        reported: whether the condition number is estimated. judged: whether the error is predicted.
        shrinkage: share `s`, 0 to 1, of what different columns have in common that is taken for chance: least squares
            have `(1 − s) AᵀA + s diag(AᵀA)` and `(1 − s) Aᵀ(Y − A Wᵀ)`. It adds `s ‖a_j‖² / (1 − s)` to the ridge of
            each column; with 1 nothing is corrected.
    """
    evidence = statistics if judged else None  # of the error
    if correction == "none" or (len(kept_columns) == weight.shape[1] and correction != "two-stream"):
        corrected = weight[:, kept_columns].double()
        return with_error(Factors(kept_columns, corrected), weight.double(), evidence)
    if statistics is None:
        raise ValueError(f"the correction {correction!r} needs statistics")
    if correction == "bias":
        means = statistics.gram[:, -1].double() / statistics.gram[-1, -1]
        means[kept_columns] = 0
        corrected = weight[:, kept_columns].double()
        corrected[:, -1] += weight.double() @ means
        return with_error(Factors(kept_columns, corrected), weight.double(), evidence)
    if correction != "same-layer" and correction != "two-stream":
        assert_never(correction)
    residual = statistics.residual if correction == "two-stream" else None
    if correction == "two-stream" and residual is None:
        raise ValueError("the two-stream correction needs statistics with a residual")
    interpolation = interpolate(towards_diagonal(statistics.gram, shrinkage), kept_columns, damping)
    factor, rest, coefficients = interpolation.factor, interpolation.rest, interpolation.coefficients
    max_interpolation = interpolation.max_coefficient
    step = None if residual is None else factor.solve(residual[kept_columns])
    condition_number = factor.condition_number if reported else None
    fallback, damping = factor.eigenvalue_fallback, factor.damping
    del interpolation, factor  # as large as the Gram in float64
    dense = weight.double()
    corrected = dense[:, kept_columns].addmm_(dense[:, rest], coefficients.T)
    if step is not None:
        corrected += residual_weight * (1 - shrinkage) * step.T
    solved = Factors(kept_columns, corrected, None, condition_number, max_interpolation, fallback, damping)
    return with_error(solved, dense, evidence)


def best_damping(
    weight: torch.Tensor,
    kept_columns: torch.Tensor,
    statistics: Statistics,
    *,
    correction: Correction,
    residual_weight: float = 1.0,
) -> float:
    """Return the damping of `DAMPINGS` with the least error on the held-out rows, solved without them.

    Arguments as in `correct`; `statistics` has `held_out`. The error is `‖Y − A W'ᵀ‖` of the sublayer's output."""
    fitted, held_out = _apart(statistics)
    if not fitted.num_rows:  # of one block, nothing says what a correction does to other text
        return DAMPINGS[-1]

    def error(damping: float) -> float:
        factors = correct(
            weight, kept_columns, fitted, correction=correction, damping=damping, residual_weight=residual_weight
        )
        return predicted_error(weight.double(), factors.weight, kept_columns, held_out)

    return min(DAMPINGS, key=error)


def best_shrinkage(
    weight: torch.Tensor, kept_columns: torch.Tensor, statistics: Statistics, *, damping: float
) -> float:
    """Return the largest of `SHRINKAGES` with about the least error on the held-out rows, solved without them.

    Its error there is at most the one without a correction, and the one with the sums as they are. The largest,
    because other text is farther from the text than its held-out part. The error is of the sublayer's own output, in
    `DIRECTIONS` random directions if it has more coordinates.

    Arguments as in `correct`; `statistics` has `held_out`. Cost: a factorisation for every share that is tried.
    """
    fitted, held_out = (replace(one, residual=None) for one in _apart(statistics))
    if not fitted.num_rows:  # as there
        return SHRINKAGES[-1]
    dense = weight.double()
    if len(dense) > DIRECTIONS:
        signs = torch.randint(0, 2, (DIRECTIONS, len(dense)), generator=torch.Generator().manual_seed(0))
        dense = (2 * signs - 1).to(dense) @ dense
    rest, rows = columns_without(kept_columns, dense.shape[1]), kept_columns.unsqueeze(1)
    kept, uncorrected = fitted.gram[rows, kept_columns], dense[:, kept_columns]
    removed = fitted.gram[rows, rest].double() @ dense[:, rest].T
    errors, energy = dict[float, float](), _energy(held_out.gram, dense.mT)

    def error_of(corrected: torch.Tensor) -> float:
        return relative(_energy(held_out.gram, _missed(dense, corrected, kept_columns).mT), energy)

    for share in SHRINKAGES:
        step = RidgeFactor(towards_diagonal(kept, share), damping, "kept columns").solve((1 - share) * removed)
        errors[share] = error_of(uncorrected + step.T)
        if errors[share] > ABOUT_EQUAL * min(errors.values()):  # and larger shares are worse still
            break
    errors[SHRINKAGES[-1]] = error_of(uncorrected)
    allowed = min(ABOUT_EQUAL * min(errors.values()), errors[SHRINKAGES[0]], errors[SHRINKAGES[-1]])
    return max(share for share, error in errors.items() if error <= allowed)


def _apart(statistics: Statistics) -> tuple[Statistics, Statistics]:
    """Return the sums over the rows that are not held out, and over those that are; `statistics` has `held_out`."""
    held_out, residual = statistics.held_out, statistics.residual
    assert held_out is not None
    if residual is not None and held_out.residual is not None:
        residual = residual - held_out.residual
    fitted = replace(
        statistics,
        gram=statistics.gram - held_out.gram,
        residual=residual,
        residual_energy=statistics.residual_energy - held_out.residual_energy,
        num_rows=statistics.num_rows - held_out.num_rows,
    )
    return fitted, held_out


def with_error(
    factors: Factors, weight: torch.Tensor, statistics: Statistics | None, *, workers: Workers = ALONE
) -> Factors:
    """Return factors with the error that statistics predict, if there are any.

    `workers`: who share the sums; all of them call this with the same factors.
    """
    if statistics is None:
        return factors
    energies = predicted_energies(weight, factors.weight, factors.kept_columns, statistics, workers)
    return replace(factors, predicted_error=relative(*energies), energies=torch.stack(energies))


def predicted_error(
    weight: torch.Tensor, corrected: torch.Tensor, kept_columns: torch.Tensor, statistics: Statistics
) -> float:
    """Return `‖Y − A[:, kept_columns] W'ᵀ‖ / ‖Y‖` from the statistics; `Y = A Wᵀ`, plus a residual."""
    return relative(*predicted_energies(weight, corrected, kept_columns, statistics))


def relative(error: torch.Tensor, energy: torch.Tensor) -> float:
    """Return the root of an error relative to the energy of what it is an error of; zero of nothing is no error."""
    return float((error.clamp_min(0) / energy.clamp_min(torch.finfo(energy.dtype).tiny)).sqrt())


def predicted_energies(
    weight: torch.Tensor,
    corrected: torch.Tensor,
    kept_columns: torch.Tensor,
    statistics: Statistics,
    workers: Workers = ALONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `‖Y − A[:, kept_columns] W'ᵀ‖²` and `‖Y‖²`, `(…)`, as `predicted_error` compares them.

    Args:
        weight: `(…, d, n)` float64. corrected: `(…, d, k)`. kept_columns: `(…, k)`.
        statistics: sums of one linear or several: Grams `(…, n, n)`, residuals `(…, n, d)` and their energies `(…)`.
    """
    missed, gram = _missed(weight, corrected, kept_columns), statistics.gram
    error, energy = _energy(gram, missed.mT, workers), _energy(gram, weight.mT, workers)
    if statistics.residual is not None:
        residual = statistics.residual.double()
        error += 2 * (missed.mT * residual).sum((-2, -1)) + statistics.residual_energy
        energy += 2 * (weight.mT * residual).sum((-2, -1)) + statistics.residual_energy
    return error, energy


def _missed(weight: torch.Tensor, corrected: torch.Tensor, kept_columns: torch.Tensor) -> torch.Tensor:
    """Return `W` less the corrected columns in their places, `(…, d, n)`; arguments as in `predicted_energies`."""
    columns = kept_columns.unsqueeze(-2).expand(corrected.shape)
    missed = weight.clone()
    return missed.scatter_(-1, columns, missed.gather(-1, columns).sub_(corrected))


def _energy(gram: torch.Tensor, columns: torch.Tensor, workers: Workers = ALONE) -> torch.Tensor:
    """Return `tr(Cᵀ G C) = ‖A C‖²` of `C (…, n, d)`, by panels of the rows of the symmetric `G`, from the diagonal on.

    It is only reported, or compared with what is far above rounding. So products are float32; sums are not. The
    `workers` share the panels.
    """
    columns, starts = columns.to(gram.dtype), range(0, gram.shape[-1], ENERGY_PANEL)
    energies = torch.zeros(len(starts), *columns.shape[:-2], dtype=torch.float64, device=gram.device)
    owners = Loads(workers.size).share_out([float(gram.shape[-1] - start) for start in starts])
    for number, start in enumerate(starts):
        if owners[number] != workers.rank:
            continue
        part, behind = columns[..., start : start + ENERGY_PANEL, :], columns[..., start + ENERGY_PANEL :, :]
        own, beside = gram[..., start : start + ENERGY_PANEL, start:].split([part.shape[-2], behind.shape[-2]], -1)
        seen = product(own, part)
        if behind.shape[-2]:
            seen.add_(product(beside, behind), alpha=2)
        energies[number] = (part * seen).sum((-2, -1), dtype=torch.float64)
    workers.sum_(energies)  # zeros from all but the owner
    return energies.sum(0)
