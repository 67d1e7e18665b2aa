"""The sketch in torch: sums of signed rows, each in the order of the data."""

from __future__ import annotations

import torch
from torch.nn import functional

from oneshot_kernels.random import below_torch, signs_torch, words_torch


def positions_and_signs(
    sketch_size: int, num_rows: int, row_offset: int, seed: int, nonzeros: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sketch rows, signs ±1), both int64[nonzeros, num_rows], of the definition in `sketch_`."""
    positions, signs = [], []
    for block in range(nonzeros):
        start, stop = block * sketch_size // nonzeros, (block + 1) * sketch_size // nonzeros
        words = words_torch(seed, block, row_offset, num_rows, device)
        positions.append(start + below_torch(words, stop - start))
        signs.append(signs_torch(words))
    return torch.stack(positions), torch.stack(signs)


def group_by_position(positions: torch.Tensor, sketch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (order, starts): entries order[starts[p] : starts[p + 1]] of `positions` equal p, in the order given."""
    grouped, order = torch.sort(positions, stable=True)
    starts = torch.searchsorted(grouped, torch.arange(sketch_size + 1, device=positions.device))
    return order, starts


def sketch_(out: torch.Tensor, rows: torch.Tensor, row_offset: int, seed: int, nonzeros: int) -> None:
    """Add S rows to `out`: a row of `out` is one sum, in the order of the data.

    On CUDA by `embedding_bag`, which has one thread for each sum; cuSPARSE does not promise the same bits twice. On a
    CPU a product with a sparse matrix is faster.
    """
    num_rows, sketch_size = rows.shape[0], out.shape[0]
    positions, signs = positions_and_signs(sketch_size, num_rows, row_offset, seed, nonzeros, rows.device)
    order, starts = group_by_position(positions.flatten(), sketch_size)
    values, rows = signs.flatten()[order].to(out.dtype) * nonzeros**-0.5, rows.to(out.dtype)
    if out.is_cuda:
        out += functional.embedding_bag(
            order % num_rows, rows, starts, mode="sum", per_sample_weights=values, include_last_offset=True
        )
        return
    embedding = torch.sparse_csr_tensor(
        starts, order % num_rows, values, (sketch_size, num_rows), check_invariants=False
    )
    out.addmm_(embedding, rows)
