"""Hypothesis strategies for matrices that break pivoting: low rank + noise, duplicates, zeros, graded; and Grams."""

import torch
from hypothesis import strategies as st
from oneshot_kernels import PivotedFactor


def seeded(seed: int) -> torch.Generator:
    """Return a generator of `seed` on the device that tensors are made on."""
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


@st.composite
def tall_or_wide(draw: st.DrawFn) -> torch.Tensor:
    """fp64 [m, n], m and n in 1 … 24, of one of the kinds above."""
    rows, columns = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    generator = seeded(draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    kind = draw(st.sampled_from(["full", "low rank + noise", "duplicates", "zeros", "graded"]))
    matrix = normal(rows, columns)
    if kind == "low rank + noise":
        rank = draw(st.integers(1, 4))
        matrix = normal(rows, rank) @ normal(rank, columns) + 1e-6 * matrix
    elif kind == "duplicates":
        matrix = matrix[:, torch.randint(0, columns, (columns,), generator=generator)]
    elif kind == "zeros":
        matrix = matrix * (torch.rand(columns, generator=generator) < 0.5)
    elif kind == "graded":
        matrix = matrix * torch.logspace(0, -5, columns, dtype=torch.float64)
    return matrix


@st.composite
def grams(draw: st.DrawFn) -> torch.Tensor:
    """AᵀA, positive semidefinite and often singular, of such a matrix."""
    matrix = draw(tall_or_wide())
    return matrix.mT @ matrix


def interpolation_matrix(factor: PivotedFactor, rank: int) -> torch.Tensor:
    """Return `T [rank, n]` with `A ≈ A[:, pivots[:rank]] T`, zero rows beyond the factorised rank."""
    solved = min(rank, factor.factorised_rank)
    matrix = factor.r.new_zeros(rank, factor.pivots.numel())
    r11, r12 = factor.r[:solved, :solved], factor.r[:solved, rank:]
    matrix[:solved, factor.pivots[rank:]] = torch.linalg.solve_triangular(r11, r12, upper=True)
    matrix[torch.arange(rank), factor.pivots[:rank]] = 1
    return matrix


def trailing_error(matrix: torch.Tensor, factor: PivotedFactor, rank: int) -> float:
    """Return `‖A − A[:, pivots[:rank]] T‖_F`, the residual itself."""
    return float((matrix - matrix[:, factor.pivots[:rank]] @ interpolation_matrix(factor, rank)).norm())
