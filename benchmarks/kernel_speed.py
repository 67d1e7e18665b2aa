"""Speed of the kernels against what they replace, on this machine's CPU.

    python benchmarks/kernel_speed.py [--sizes 512 … 11008] [--max-geqp3 8192] [--model DIR --text FILE] [--output FILE]

For each n: a tall matrix of 4 n rows, fp64 where not named. Pivots (sketch and Gram included) against SciPy's geqp3 and
against unpivoted torch QR; Grams against X.T @ X; sketches against one read-and-add pass over the same bytes and
against torch.sparse. One row per (operation, n), medians with p20 and p80; a row with `repetitions` 1 is one run. With
--model and --text the quality of the pivots is measured on that model's FFN activations too. The last line printed is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import scipy.linalg
import torch
from harness import fitted_exponent, provenance
from oneshot_kernels import (
    blocked_pivoted_cholesky,
    gram_,
    interpolation_from_data,
    pivoted_cholesky,
    pivoted_qr,
    sketch_,
    sketched_pivots,
    trailing_error_from_data,
)
from oneshot_kernels.count_sketch.torch_impl import positions_and_signs
from pivot_quality import ffn_activations

LARGE = 4096  # from this n on: one repetition, and only the operations of the headline


def timed(operation: Callable[[], object], repetitions: int) -> dict[str, float]:
    """Median, p20 and p80 of the seconds of `repetitions` runs, after one that is not counted if there are several.

    `cpu_seconds` (mean, all threads) and `load` (runnable processes a minute) show what else the machine was doing.
    """
    if repetitions > 1:
        operation()
    seconds = []
    cpu_start = time.process_time()
    for _ in range(repetitions):
        start = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - start)
    low, middle, high = np.percentile(seconds, [20, 50, 80])
    cpu_seconds = (time.process_time() - cpu_start) / repetitions
    return {
        "median_seconds": middle,
        "p20_seconds": low,
        "p80_seconds": high,
        "repetitions": repetitions,
        "cpu_seconds": cpu_seconds,
        "load": os.getloadavg()[0],
    }


def read_and_add(accumulator: torch.Tensor, rows: torch.Tensor) -> None:
    """What a sketch would cost if its addresses were consecutive: each row is added once to one of s rows."""
    for block in rows.split(accumulator.shape[0]):
        accumulator[: block.shape[0]] += block


def sparse_product(sketch_size: int, rows: torch.Tensor) -> torch.Tensor:
    """CountSketch as a user of torch would write it: a COO matrix times the data."""
    positions, signs = positions_and_signs(sketch_size, rows.shape[0], 0, 0, 1, rows.device)
    where = torch.stack([positions[0], torch.arange(rows.shape[0])])
    shape = (sketch_size, rows.shape[0])
    return torch.sparse_coo_tensor(where, signs[0].to(rows.dtype), shape, check_invariants=False) @ rows


def tall_matrix(size: int, seed: int) -> torch.Tensor:
    """fp32 [4 n, n] with columns graded over three decades. The time of no operation here depends on the values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4 * size, size, generator=generator) * torch.logspace(0, -3, size)


def fp32_operations(size: int, seed: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, closure): sketches and Grams of fp32 rows."""
    matrix = tall_matrix(size, seed)
    accumulator = torch.zeros(size, size)
    yield "read-and-add fp32", lambda: read_and_add(accumulator, matrix)
    yield "sum fp32", lambda: matrix.sum()
    yield "count sketch fp32", lambda: sketch_(accumulator, matrix, row_offset=0, seed=seed)
    yield "sparse sign 8 fp32", lambda: sketch_(accumulator, matrix, row_offset=0, seed=seed, nonzeros=8)
    yield "torch.sparse COO fp32", lambda: sparse_product(size, matrix)
    yield "X.T @ X fp32", lambda: matrix.mT @ matrix
    yield "gram_ fp32", lambda: gram_(torch.zeros(size, size), matrix)
    yield "pivots, fp32 Gram", lambda: pivoted_cholesky(gram_(torch.zeros(size, size), matrix))
    yield "pivots fp32, sketched", lambda: sketched_pivots(matrix, seed=seed)


def fp64_operations(size: int, seed: int, with_geqp3: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, closure): Grams and factorisations of fp64 rows, the slowest last."""
    matrix = tall_matrix(size, seed).double()

    @cache
    def gram() -> torch.Tensor:
        return gram_(torch.zeros(size, size, dtype=torch.float64), matrix)

    yield "X.T @ X fp64", lambda: matrix.mT @ matrix
    yield "gram_ fp64", lambda: gram_(torch.zeros(size, size, dtype=torch.float64), matrix)
    yield "pivots, fp64 Gram", lambda: pivoted_cholesky(gram_(torch.zeros(size, size, dtype=torch.float64), matrix))
    yield "pivots, sketched", lambda: sketched_pivots(matrix, seed=seed)
    if size < LARGE:
        yield "pivoted_cholesky fp64", lambda: pivoted_cholesky(gram())
        yield "blocked_pivoted_cholesky", lambda: blocked_pivoted_cholesky(gram())
        yield "CQRRPT fp64", lambda: pivoted_qr(matrix, method="cqrrpt", seed=seed)
        yield "QR, then geqp3 of R", lambda: pivoted_qr(torch.linalg.qr(matrix, mode="r")[1], method="lapack")
        yield "BQRRP fp64", lambda: pivoted_qr(matrix, method="randomized", seed=seed)
    if with_geqp3:
        yield "torch.linalg.qr fp64", lambda: torch.linalg.qr(matrix, mode="r")
        columns = np.asfortranarray(matrix.numpy())
        yield "geqp3", lambda: scipy.linalg.qr(columns, mode="r", pivoting=True, check_finite=False)


def trailing_error_excess(model: str, text: str, tokens: int) -> float:
    """Largest ‖R22‖_F / ‖R22 of geqp3‖_F - 1 at k = n/2 over the layers, for the pivots that are timed."""
    excesses = []
    for matrix in ffn_activations(model, text, tokens).values():
        size = matrix.shape[1]
        errors = []
        for factor in (sketched_pivots(matrix), pivoted_qr(matrix, method="lapack")):
            skeleton = factor.pivots[: size // 2]
            errors.append(trailing_error_from_data(matrix, interpolation_from_data(matrix, skeleton), skeleton))
        excesses.append(errors[0] / errors[1] - 1)
    return max(excesses)


def ratio(table: dict[str, dict[int, float]], slow: str, fast: str, size: int) -> float | None:
    """Median of `slow` over median of `fast` at n = `size`; None where one was not measured."""
    if size not in table.get(slow, {}) or size not in table.get(fast, {}):
        return None
    return table[slow][size] / table[fast][size]


def print_table(table: dict[str, dict[int, float]], sizes: list[int]) -> None:
    """Seconds against n, with the fitted exponent."""
    print(f"{'seconds':24}" + "".join(f"{size:>10}" for size in sizes) + "  exponent")
    for name, seconds in table.items():
        cells = "".join(f"{seconds.get(size, math.nan):10.3g}" for size in sizes)
        exponent = fitted_exponent(seconds)
        print(f"{name:24}{cells}" + ("" if exponent is None else f"{exponent:10.2f}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 1536, 2048, 4096, 8192, 11008])
    parser.add_argument("--max-geqp3", type=int, default=8192, help="no pivoted or unpivoted QR above this n")
    parser.add_argument("--model", help="dense checkpoint, for the quality on real activations")
    parser.add_argument("--text", help="text for --model")
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", nargs="+", help="time only these (names as in the table; default all)")
    parser.add_argument("--quick", action="store_true", help="sizes up to 1536 only")
    parser.add_argument("--output", default="benchmarks/results/kernels.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = [size for size in arguments.sizes if not arguments.quick or size <= 1536]
    table: dict[str, dict[int, float]] = {}
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    origin = provenance(seed=arguments.seed)
    excess: float | None = None
    if arguments.model and arguments.text:
        excess = trailing_error_excess(arguments.model, arguments.text, arguments.tokens)
        print(f"largest excess of ‖R22‖ over geqp3's, sketched pivots: {100 * excess:.3f} %", flush=True)
    with Path(arguments.output).open("a", encoding="utf-8") as output:
        for size in sizes:
            for name, operation in chain(
                fp32_operations(size, arguments.seed),
                fp64_operations(size, arguments.seed, size <= arguments.max_geqp3),
            ):
                if arguments.operations and name not in arguments.operations:
                    continue
                repetitions = 1 if size > LARGE or (size == LARGE and name == "geqp3") else 3 if size > 2048 else 7
                timing = timed(operation, repetitions)
                row = {"operation": name, "columns": size, "rows": 4 * size, **timing, **origin}
                output.write(json.dumps(row) + "\n")
                output.flush()
                table.setdefault(name, {})[size] = timing["median_seconds"]
                print(f"{name:24} n = {size:6} {timing['median_seconds']:.4g} s", flush=True)
    print_table(table, sizes)
    sketch_ratios = [ratio(table, "count sketch fp32", "read-and-add fp32", size) for size in sizes if size >= 1024]
    headline = {
        "geqp3_ratio_1536": ratio(table, "geqp3", "pivots, sketched", 1536),
        "geqp3_ratio_8192": ratio(table, "geqp3", "pivots, sketched", 8192),
        "trailing_error_excess": excess,
        "count_sketch_ratio": max((r for r in sketch_ratios if r is not None), default=None),
    }
    print(json.dumps(headline))


if __name__ == "__main__":
    main()
