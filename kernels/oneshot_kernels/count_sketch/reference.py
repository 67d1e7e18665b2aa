"""The sketch in NumPy: S as a dense matrix, row by row, in fp64."""

from __future__ import annotations

import numpy as np
import torch

from oneshot_kernels.random import words_numpy


def embedding_matrix(sketch_size: int, num_rows: int, row_offset: int, seed: int, nonzeros: int) -> np.ndarray:
    """Return S[:, row_offset : row_offset + num_rows] as float64[sketch_size, num_rows]."""
    embedding = np.zeros((sketch_size, num_rows))
    for block in range(nonzeros):
        start, stop = block * sketch_size // nonzeros, (block + 1) * sketch_size // nonzeros
        for row, word in enumerate(words_numpy(seed, block, row_offset, num_rows)):
            position = start + (int(word) >> 32) * (stop - start) // 2**32
            embedding[position, row] = (-1.0 if int(word) & 1 else 1.0) / np.sqrt(nonzeros)
    return embedding


def sketch_(out: torch.Tensor, rows: torch.Tensor, row_offset: int, seed: int, nonzeros: int) -> None:
    """Add S rows to `out`, through a dense S in fp64 on the CPU."""
    embedding = embedding_matrix(out.shape[0], rows.shape[0], row_offset, seed, nonzeros)
    out += torch.from_numpy(embedding @ rows.double().cpu().numpy()).to(out)
