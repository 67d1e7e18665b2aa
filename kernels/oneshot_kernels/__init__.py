"""Sketches, Grams and pivoted factorisations for structured compression: torch, NumPy, SciPy, and Triton if present."""

from oneshot_kernels.backend import KernelError
from oneshot_kernels.count_sketch import sketch_
from oneshot_kernels.gram import cross_gram_, gram_, mirror_
from oneshot_kernels.pivoted_qr import PivotedFactor, pivoted_qr
from oneshot_kernels.pivoted_qr.cholesky import blocked_pivoted_cholesky, cholesky_pivots_, pivoted_cholesky
from oneshot_kernels.pivoted_qr.factor import columns_without, suffix_sums
from oneshot_kernels.pivoted_qr.grouped import grouped_pivots, tournament_pivots
from oneshot_kernels.pivoted_qr.interpolation import (
    interpolation_from_data,
    interpolation_matrix,
    trailing_error_from_data,
)
from oneshot_kernels.pivoted_qr.randomized import sketched_pivots
from oneshot_kernels.pivoted_qr.strong_rrqr import strong_rrqr_swaps

__all__ = [
    "KernelError",
    "PivotedFactor",
    "blocked_pivoted_cholesky",
    "cholesky_pivots_",
    "columns_without",
    "cross_gram_",
    "gram_",
    "grouped_pivots",
    "interpolation_from_data",
    "interpolation_matrix",
    "mirror_",
    "pivoted_cholesky",
    "pivoted_qr",
    "sketch_",
    "sketched_pivots",
    "strong_rrqr_swaps",
    "suffix_sums",
    "tournament_pivots",
    "trailing_error_from_data",
]
