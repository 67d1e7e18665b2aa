"""Grams that real models and 16-bit sums give: of any rank, indefinite by rounding, beside a massive activation."""

import numpy as np
import torch
from strategies import Matrix

TENSOR_CORES = (
    2.7e-5  # what a Gram of bfloat16 rows on tensor cores was off by, as a share of its norm: measured on an H100
)
MASSIVE = 1e8  # one eigenvalue, in units of the mean of the others

RANKS = ("zero", "rank 1", "rank n/2", "rank n-1", "full rank")
SPECTRA = ("plain", "massive direction", "massive coordinate")
ROUNDINGS = ("float32", "tensor cores")
HOSTILE = tuple((rank, spectrum, rounding) for rank in RANKS for spectrum in SPECTRA for rounding in ROUNDINGS)


def hostile_gram(rank: str, spectrum: str, rounding: str, *, size: int, seed: int = 0) -> torch.Tensor:
    """Return a Gram `(size, size)` float32, exactly symmetric as the sums are, of a rank before it was rounded."""
    rng = np.random.default_rng(seed)
    rows = {"zero": 0, "rank 1": 1, "rank n/2": size // 2, "rank n-1": size - 1, "full rank": 4 * size}[rank]
    activations = rng.standard_normal((rows, size))
    gram = activations.T @ activations
    if spectrum != "plain":
        direction = np.eye(size)[size // 3] if spectrum == "massive coordinate" else rng.standard_normal(size)
        direction /= np.linalg.norm(direction)
        gram += MASSIVE * np.trace(gram) / size * np.outer(direction, direction)
    if rounding == "tensor cores":
        gram += TENSOR_CORES * np.linalg.norm(gram) * symmetric_noise(rng, size)
    rounded = torch.from_numpy(gram).float()
    return rounded.triu() + rounded.triu(1).T


def symmetric_noise(rng: np.random.Generator, size: int) -> Matrix:
    """Return a symmetric matrix whose Frobenius norm is one."""
    noise = rng.standard_normal((size, size))
    noise += noise.T
    return np.asarray(noise / np.linalg.norm(noise))
