"""(weights, statistics, kept columns) -> the corrected consuming linear. Pure functions."""

from dataclasses import replace

import torch

from oneshot.errors import CalibrationError
from oneshot.linalg.interpolative import interpolate
from oneshot.linalg.low_rank import query_key_maps, strongest_rotary_pairs, value_subspace
from oneshot.linalg.psd import RidgeFactor
from oneshot.records import BlockStatistics, Factors

ENERGY_PANEL = 1024
DAMPINGS = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1)


def correct(
    weight: torch.Tensor,
    kept: torch.Tensor,
    statistics: BlockStatistics | None,
    *,
    correction: str,
    damping: float,
    residual_weight: float = 1.0,
) -> Factors:
    """The consuming linear over the kept columns: `y ≈ A[:, kept] weight'ᵀ`.

    Args:
        weight: `(d, n)`, with the bias as last column where `statistics` has a constant column.
        kept: `(k,)` ascending columns.
        correction: `none` keeps `weight[:, kept]`. `bias` adds to its last column, the bias, what the other columns
            give on average (FLAP, arXiv 2312.11983: baseline bias compensation). `same-layer` solves
            `min ‖A Wᵀ − A[:, kept] W'ᵀ‖² + λ‖W' − W[:, kept]‖²` (STAT section 3.1; METHODS section 2), which is
            `W' = W Pᵀ` with the ridged interpolation matrix. `two-stream` has the target `A Wᵀ + ρ (Y − A Wᵀ)`, `Y` the
            dense stream's next hidden state less this stream's residual, `ρ = residual_weight`.
    """
    if correction == "none" or (len(kept) == weight.shape[1] and correction != "two-stream"):
        corrected = weight[:, kept].double()
        return Factors(kept, corrected, _error_if_known(weight.double(), corrected, kept, statistics))
    if statistics is None:
        raise ValueError(f"the correction {correction!r} needs statistics")
    if correction == "bias":
        means = statistics.gram[:, -1].double() / statistics.gram[-1, -1]
        means[kept] = 0
        corrected = weight[:, kept].double()
        corrected[:, -1] += weight.double() @ means
        return Factors(kept, corrected, predicted_error(weight.double(), corrected, kept, statistics))
    residual = statistics.residual if correction == "two-stream" else None
    if correction == "two-stream" and residual is None:
        raise ValueError("the two-stream correction needs statistics with a residual")
    interpolation = interpolate(statistics.gram, kept, damping)
    factor, rest, coefficients = interpolation.factor, interpolation.rest, interpolation.coefficients
    max_interpolation = interpolation.max_coefficient
    step = None if residual is None else factor.solve(residual[kept])
    condition_number, fallback = factor.condition_number, factor.eigenvalue_fallback
    del interpolation, factor  # as large as the Gram in float64
    dense = weight.double()
    corrected = dense[:, kept].addmm_(dense[:, rest], coefficients.T)
    if step is not None:
        corrected += residual_weight * step.T
    error = _error_if_known(dense, corrected, kept, statistics)
    return Factors(kept, corrected, error, condition_number, max_interpolation, fallback, damping)


def best_damping(
    weight: torch.Tensor,
    kept: torch.Tensor,
    statistics: BlockStatistics,
    *,
    correction: str,
    residual_weight: float = 1.0,
) -> float:
    """Of `DAMPINGS`, the one whose correction, solved without the held-out rows, errs least on these.

    Arguments as in `correct`; `statistics` has `held_out`. The error is that of the block's output, `‖Y − A W'ᵀ‖`.

    Raises `CalibrationError` where no rows are left without the held-out ones.
    """
    held_out = statistics.held_out
    assert held_out is not None
    if held_out.num_rows == statistics.num_rows:
        raise CalibrationError(
            "--damping auto keeps every eighth batch of the text apart, and there is only one; give more "
            "--num-sequences, a smaller --batch-size, or a number as --damping."
        )
    residual = statistics.residual
    if residual is not None and held_out.residual is not None:
        residual = residual - held_out.residual
    fitted = replace(
        statistics,
        gram=statistics.gram - held_out.gram,
        residual=residual,
        residual_energy=statistics.residual_energy - held_out.residual_energy,
        num_rows=statistics.num_rows - held_out.num_rows,
    )

    def error(damping: float) -> float:
        factors = correct(weight, kept, fitted, correction=correction, damping=damping, residual_weight=residual_weight)
        return predicted_error(weight.double(), factors.weight, kept, held_out)

    return min(DAMPINGS, key=error)


def reduce_values(
    weight: torch.Tensor,
    gram: torch.Tensor,
    *,
    num_groups: int,
    head_dim: int,
    size: int,
    correct: bool,
    damping: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A subspace of `size` value coordinates for every KV group, and the `o_proj` that sees nothing else.

    The subspace of a group is the best one for its heads pooled (`linalg.low_rank.value_subspace`); then least squares
    over all heads at once, `min ‖Z Wᵀ − Z Q W'ᵀ‖² + λ‖W' − W Eᵀ‖²`, with λ as in `correct`.

    Args:
        weight: `o_proj (D, H·h)`. gram: `ZᵀZ (H·h, H·h)` of what it reads. correct: whether to solve, or keep `W Eᵀ`.

    Returns:
        `Q (G, h, size)` float64 with orthonormal columns, and `W' Qᵀ (D, H·h)` float64.
    """
    num_heads = weight.shape[1] // head_dim
    heads_per_group = num_heads // num_groups
    dense, full = weight.double(), gram.double()
    bases, embeddings = [], []
    for group in range(num_groups):
        columns = [
            slice(head * head_dim, (head + 1) * head_dim)
            for head in range(group * heads_per_group, (group + 1) * heads_per_group)
        ]
        pooled = torch.stack([full[part, part] for part in columns]).sum(0)
        output = torch.stack([dense[:, part].T @ dense[:, part] for part in columns]).sum(0)
        basis, embedding = value_subspace(pooled, output, size)
        bases.append(basis)
        embeddings.append(embedding)
    inside = torch.block_diag(*(basis for basis in bases for _ in range(heads_per_group)))
    outside = torch.block_diag(*(embedding for embedding in embeddings for _ in range(heads_per_group)))
    inner = dense @ outside.T
    if correct:
        crossed = inside.T @ full
        factor = RidgeFactor(crossed @ inside, damping)
        inner = inner + factor.solve(crossed @ (dense.T - inside @ inner.T)).T
    return torch.stack(bases), inner @ inside.T


def reduce_queries_keys(
    query_grams: torch.Tensor, key_grams: torch.Tensor, *, size: int, rotary: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Maps of every head's queries and every KV group's keys to `size` coordinates that give nearly the same scores.

    With rotary positions whole pairs are kept, the same in all query heads of a group, because nothing else commutes
    with the rotation; without them the maps are of any kind, for one query head per group.

    Args:
        query_grams: `(H, h, h)`, key_grams: `(G, h, h)`: sums over the tokens of `q qᵀ` and `k kᵀ`, before rotation.

    Returns:
        `M (H, size, h)` and `N (G, size, h)` float64 with scores `(N k)ᵀ (M q)`, and the kept pairs `(G, size / 2)`.
    """
    num_groups, head_dim = key_grams.shape[:2]
    heads_per_group = len(query_grams) // num_groups
    if rotary:
        identity = torch.eye(head_dim, dtype=torch.float64, device=query_grams.device)
        energies = query_grams.diagonal(dim1=1, dim2=2).double().view(num_groups, heads_per_group, head_dim)
        pairs = torch.stack(
            [
                strongest_rotary_pairs(energies[group], key_grams[group].diagonal().double(), size // 2)
                for group in range(num_groups)
            ]
        )
        rows = torch.cat((pairs, pairs + head_dim // 2), dim=1)
        return identity[rows].repeat_interleave(heads_per_group, dim=0), identity[rows], pairs
    maps = [query_key_maps(query, key, size) for query, key in zip(query_grams, key_grams, strict=True)]
    return torch.stack([query for query, _ in maps]), torch.stack([key for _, key in maps]), None


def _error_if_known(
    weight: torch.Tensor, corrected: torch.Tensor, kept: torch.Tensor, statistics: BlockStatistics | None
) -> float | None:
    return None if statistics is None else predicted_error(weight, corrected, kept, statistics)


def predicted_error(
    weight: torch.Tensor, corrected: torch.Tensor, kept: torch.Tensor, statistics: BlockStatistics
) -> float:
    """`‖Y − A[:, kept] W'ᵀ‖ / ‖Y‖` from the statistics alone, `Y = A Wᵀ` plus the residual where one is kept."""
    difference = weight.T.clone()
    difference[kept] -= corrected.T
    error = _energy(statistics.gram, difference)
    energy = _energy(statistics.gram, weight.T)
    if statistics.residual is not None:
        residual = statistics.residual.double()
        error += 2 * (difference * residual).sum() + statistics.residual_energy
        energy += 2 * (weight.T * residual).sum() + statistics.residual_energy
    return float((error.clamp_min(0) / energy.clamp_min(torch.finfo(energy.dtype).tiny)).sqrt())


def _energy(gram: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`tr(Cᵀ G C) = ‖A C‖²` in float64, a panel of the Gram's rows at a time so that no float64 copy of it is made."""
    panels = zip(gram.split(ENERGY_PANEL), columns.split(ENERGY_PANEL), strict=True)
    return torch.stack([(part * (panel.double() @ columns)).sum() for panel, part in panels]).sum()
