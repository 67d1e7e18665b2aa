"""CountSketch and sparse sign embeddings of a stream of row blocks."""

from __future__ import annotations

import torch

from oneshot_kernels import backend


def sketch_(out: torch.Tensor, rows: torch.Tensor, *, row_offset: int, seed: int, nonzeros: int = 1) -> torch.Tensor:
    """Add S[:, row_offset : row_offset + m] rows to `out` in place, S the sparse sign embedding of `seed`.

    The s rows of `out` are divided into ζ = `nonzeros` blocks, block b being rows ⌊b s/ζ⌋ … ⌊(b+1) s/ζ⌋ - 1. Column i
    of S has one non-zero in each block: w = word(seed, stream=b, index=i) (`oneshot_kernels.random`) gives its place
    (high 32 bits) and its sign (lowest bit); its size is 1/√ζ. So E[SᵀS] = I. ζ = 1 is CountSketch (Clarkson & Woodruff
    2013, arXiv:1207.6365; STAT §3.4), ζ > 1 the block form of OSNAP (Nelson & Nguyen 2013, arXiv:1211.1002; Kane &
    Nelson 2014, arXiv:1012.1577).

    out         [s, n] fp32 or fp64: the accumulator, and the dtype sums are made in.
    rows        [m, n] bf16, fp16, fp32 or fp64, any strides: data rows row_offset … row_offset + m - 1.
    row_offset  index of the first row in the whole stream; each row of the data set must have one index, once.
    Returns `out`.

    S depends on (s, seed, ζ, row index) alone: so sketches of disjoint rows add up to the sketch of all of them, for
    any batching, order, device or number of workers. The same calls give the same bits (each entry is summed in row
    order, without atomics); other batch boundaries change the rounding only.
    Raises ValueError for shapes, dtypes or ζ that do not fit, `KernelError` as `oneshot_kernels.backend` says.
    Cost ζ m n additions, one pass over `rows` and ζ-fold gathers; touches all of `out`, so give it m >= s rows a call.
    """
    if out.ndim != 2 or rows.ndim != 2 or out.shape[1] != rows.shape[1]:
        raise ValueError(f"out [s, n] and rows [m, n] differ: {tuple(out.shape)} and {tuple(rows.shape)}")
    if out.dtype not in (torch.float32, torch.float64) or not rows.is_floating_point():
        raise ValueError(f"out must be fp32 or fp64 and rows floating, got {out.dtype} and {rows.dtype}")
    if not 1 <= nonzeros <= out.shape[0] < 2**31:
        raise ValueError(f"nonzeros {nonzeros} is outside [1, {out.shape[0]} rows of out]")
    if row_offset < 0:
        raise ValueError(f"row_offset {row_offset} is negative")
    if rows.numel() > 0:
        faster = out.dtype == torch.float32 and backend.triton_runs_on(rows)  # not measured in fp64
        default: backend.Backend = "triton" if faster else "torch"
        backend.run("count_sketch", "sketch_", rows, out, rows, row_offset, seed, nonzeros, default=default)
    return out
