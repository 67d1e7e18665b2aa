"""What every factorisation makes of Grams that rounding left singular or indefinite: nothing is timed.

Grams of five ranks, with and without a massive activation, as exact as float32 sums or as sums of 16-bit products on
tensor cores (`tests/hostile_grams.py`). One row for every kind of Gram and factorisation goes to
`results/singular_grams.jsonl`: how often it raised an exception, and at most how many times the rounding is in what it
returned. `--tree DIR` measures another checkout, for a comparison.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
SIZE = 256
SEEDS = 3
Measure = Callable[[torch.Tensor], float]


def measures() -> dict[str, Measure]:
    """Return the factorisations of the packages that are imported; each returns an error in units of the rounding.

    The rounding of a Gram is the size of its most negative eigenvalue, which the exact Gram has not. An inverse that is
    larger than one over that makes more of the rounding than there was.
    """
    from oneshot.linalg import elimination, interpolative, low_rank, pca, psd

    weight = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(0))

    def rounding(gram: torch.Tensor) -> float:
        values = torch.linalg.eigvalsh(gram.double())
        return max(-float(values[0]), torch.finfo(values.dtype).eps * float(values[-1]))

    def root(gram: torch.Tensor) -> float:
        make: Any = low_rank.damped_root
        found = make(gram, "inputs") if make.__code__.co_argcount > 1 else make(gram)
        return rounding(gram) / float(torch.linalg.svdvals(found)[-1]) ** 2

    def curve(gram: torch.Tensor) -> float:
        found = interpolative.ordered_factor(gram, torch.arange(len(gram)))
        allowed = rounding(gram) + interpolative.SMALLEST_RIDGE * float(gram.diagonal().double().mean())
        difference = torch.linalg.matrix_norm(found.T @ found - gram.double(), 2)
        return float(difference) / max(allowed, torch.finfo(torch.float64).tiny)

    def ridge(damping: float) -> Measure:
        def measure(gram: torch.Tensor) -> float:
            inverse = psd.RidgeFactor(gram, damping).solve(torch.eye(len(gram), dtype=torch.float64))
            return rounding(gram) * float(torch.linalg.matrix_norm(inverse, 2))

        return measure

    def eliminated(gram: torch.Tensor) -> float:
        kept = elimination.eliminate(gram, weight, kept=SIZE // 16, block_size=8, damping=1e-2)
        return 0.0 if len(set(kept.tolist())) == SIZE // 16 else torch.inf

    def inside_heads(gram: torch.Tensor) -> float:
        basis, embedding = low_rank.value_subspace(
            gram[:64, :64], weight[:, :64].double().T @ weight[:, :64].double(), 16
        )
        return 0.0 if bool(basis.isfinite().all() and embedding.isfinite().all()) else torch.inf

    def directions(gram: torch.Tensor) -> float:
        found = pca.principal_directions(gram)
        return float((found.T @ found - torch.eye(len(gram), dtype=found.dtype)).abs().max())

    return {
        "linears and vocabulary of low rank": root,
        "error curves": curve,
        "correction, damping 3e-2": ridge(3e-2),
        "correction, damping 1e-6": ridge(1e-6),
        "correction, damping 0": ridge(0.0),
        "elimination": eliminated,
        "sizes inside heads": inside_heads,
        "principal directions": directions,
    }


def found(tree: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for every Gram and factorisation, by the packages of `tree`."""
    sys.path[:0] = [str(tree), str(tree / "kernels"), str(ROOT / "tests")]
    from hostile_grams import HOSTILE, hostile_gram

    torch.set_num_threads(1)
    for name, measure in measures().items():
        for rank, spectrum, rounding in HOSTILE:
            row: dict[str, Any] = {"factorisation": name, "rank": rank, "spectrum": spectrum, "rounding": rounding}
            errors, raised = [0.0], 0
            for seed in range(SEEDS):
                try:
                    errors.append(measure(hostile_gram(rank, spectrum, rounding, size=SIZE, seed=seed)))
                except (RuntimeError, ValueError):  # LinAlgError is a RuntimeError
                    raised += 1
            yield row | {"grams": SEEDS, "raised": raised, "times_rounding": min(max(errors), 1e300)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tree", type=Path, default=ROOT)
    options.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    tree = arguments.tree.resolve()
    if arguments.rows:
        for row in found(tree):
            print(json.dumps(row))
        return
    from harness import append_row, provenance

    commit = subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    script = [sys.executable, __file__, f"--tree={tree}", "--rows"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{tree}: {done.stderr[-2000:]}")
    shared = provenance(commit=commit.stdout.strip(), is_before=tree != ROOT, size=SIZE)
    for line in done.stdout.splitlines():
        append_row("singular_grams", shared | json.loads(line))


if __name__ == "__main__":
    main()
