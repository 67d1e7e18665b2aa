"""Run the kernels on the pretended device; print a JSON line for each: kernels, waits, peak bytes, and the error.

PYTHONPATH=kernels python tests/device/kernels_on_pretended_cuda.py
"""

import json
from collections.abc import Callable
from itertools import product

import scipy.linalg
import torch
from oneshot_kernels import (
    cholesky_pivots_,
    cross_gram_,
    gram_,
    grouped_pivots,
    mirror_,
    pivoted_cholesky,
    pivoted_qr,
    sketch_,
    tournament_pivots,
)
from oneshot_kernels.pivoted_qr.randomized import greedy_pivots
from pretend_cuda import Log, pretend

SIZE = 256
GROUP = 64
Measured = dict[str, object]
Run = Callable[[], torch.Tensor]


def well_spread(rows: int, columns: int) -> torch.Tensor:
    """Return fp64 [rows, columns] whose pivots no rounding can change."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -2, columns, dtype=torch.float64)[torch.randperm(columns, generator=generator)]
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator) * scales


def measure(log: Log, name: str, run: Run, want: torch.Tensor, *, upper: bool = False, **facts: object) -> Measured:
    """Return what `run` took, with peak bytes beyond what was there before, and the largest error (of the triangle)."""
    log.reset()
    before = log.live_bytes
    got = run()
    found: Measured = {"name": name, "kernels": sum(log.kernels.values()), "waits": sum(log.waits.values())}
    found |= {"waits_by_line": dict(log.waits), "by_chance": dict(log.by_chance), "peak_bytes": log.peak_bytes - before}
    error = got.cpu().double() - want.double()
    return {**found, "error": float((error.triu() if upper else error).abs().max()), **facts}


def pivots(log: Log, rank: int) -> list[Measured]:
    """Return measurements of everything that chooses columns.

    `taken` counts the pivots of all groups and rounds. `pivoted_qr` of a matrix has other pivots on a CPU (LAPACK's),
    so there the norm of the matrix is what is compared.
    """
    matrix = well_spread(2 * SIZE, SIZE)
    gram, norm = matrix.mT @ matrix, matrix.norm()[None]
    its_matrix, its_gram = matrix.to("cuda"), gram.to("cuda")
    greedy, own = cholesky_pivots_(gram.clone(), rank=rank), its_gram.clone()
    wide, groups = its_matrix[: rank + 8], {"group_size": GROUP, "rank": rank}
    order = scipy.linalg.qr(wide.cpu().numpy(), mode="r", pivoting=True)[1]
    # A panel of GROUP / 2 pivots: so many from each group, then from each pair, until one is left.
    entrants = [-(-(SIZE - done) // GROUP) for done in range(0, rank, GROUP // 2)]
    rounds = sum(GROUP // 2 * (2 * count - 1) for count in entrants)
    runs: dict[str, tuple[Run, torch.Tensor, int]] = {
        "cholesky_pivots_": (lambda: cholesky_pivots_(own, rank=rank), greedy, rank),
        "pivoted_cholesky": (lambda: pivoted_cholesky(its_gram, rank=rank).pivots[:rank], greedy, rank),
        "greedy_pivots": (lambda: greedy_pivots(wide, rank, 0.0)[0], torch.from_numpy(order[:rank]), rank),
        "pivoted_qr": (lambda: pivoted_qr(its_matrix, rank=rank).trailing_errors[:1], norm, rank),
        "grouped_pivots": (
            lambda: grouped_pivots(gram=its_gram, **groups).pivots[:rank],
            grouped_pivots(gram=gram, **groups).pivots[:rank],
            2 * rank,
        ),
        "tournament_pivots": (
            lambda: tournament_pivots(gram=its_gram, **groups).pivots[:rank],
            tournament_pivots(gram=gram, **groups).pivots[:rank],
            rounds + 2 * rank,
        ),
        "grouped_pivots of a matrix": (
            lambda: grouped_pivots(matrix=its_matrix, **groups).trailing_errors[:1],
            norm,
            SIZE + rank,
        ),
    }
    return [
        measure(log, name, run, want, rank=rank, taken=taken, square_bytes=gram.nbytes)
        for name, (run, want, taken) in runs.items()
    ]


def sums(log: Log, columns: int, dtype: torch.dtype, accumulated: torch.dtype) -> list[Measured]:
    """Return measurements of everything that sums rows of `dtype` in `accumulated`."""
    rows = well_spread(40, columns).to(dtype)
    exact, its_rows, turned = rows.to(accumulated).double(), rows.to("cuda"), rows.flip(1).to("cuda")
    square = exact.mT @ exact
    facts = {"rows": str(dtype), "out": str(accumulated)}

    def zeros(height: int) -> torch.Tensor:
        return torch.zeros(height, columns, dtype=accumulated, device="cuda")

    whole, cross, sketch = zeros(columns), zeros(columns), zeros(30)
    sketched = sketch_(torch.zeros(30, columns, dtype=torch.float64), exact, row_offset=0, seed=1)
    return [
        measure(log, "gram_", lambda: gram_(whole, its_rows, mirror=False), square, upper=True, **facts),
        measure(log, "mirror_", lambda: mirror_(whole), square, **facts),
        measure(log, "cross_gram_", lambda: cross_gram_(cross, its_rows, turned), square.flip(1), **facts),
        measure(log, "sketch_", lambda: sketch_(sketch, its_rows, row_offset=0, seed=1), sketched, **facts),
    ]


def mixed() -> str:
    """Return the error of a host tensor that meets the device."""
    try:
        gram_(torch.zeros(3, 3, device="cuda"), torch.zeros(2, 3))
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    """Print all measurements."""
    torch.set_num_threads(1)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    with pretend() as log, torch.inference_mode():
        found = [each for rank in (SIZE // 8, SIZE // 4) for each in pivots(log, rank)]
        for case in product((65, 1100), dtypes, dtypes[2:]):
            found += sums(log, *case)
        found.append({"name": "mixed devices", "message": mixed()})
    print("\n".join(map(json.dumps, found)))


if __name__ == "__main__":
    main()
