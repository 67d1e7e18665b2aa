"""Sketches, Grams and pivoted factorisations for structured compression: torch, NumPy, SciPy, and Triton if present."""

from oneshot_kernels.backend import KernelError
from oneshot_kernels.count_sketch import sketch_
from oneshot_kernels.gram import cross_gram_, gram_, mirror_
from oneshot_kernels.pivoted_qr import PivotedFactor, pivoted_qr
from oneshot_kernels.pivoted_qr.cholesky import cholesky_pivots_, pivoted_cholesky
from oneshot_kernels.pivoted_qr.factor import columns_without, suffix_sums
from oneshot_kernels.pivoted_qr.grouped import grouped_pivots, tournament_pivots

__all__ = [
    "KernelError",
    "PivotedFactor",
    "cholesky_pivots_",
    "columns_without",
    "cross_gram_",
    "gram_",
    "grouped_pivots",
    "mirror_",
    "pivoted_cholesky",
    "pivoted_qr",
    "sketch_",
    "suffix_sums",
    "tournament_pivots",
]
