"""Pivot quality: ‖R22‖_F and max|T| at k = n/2 against geqp3 and the SVD bound, on activations and on bad inputs.

    python benchmarks/pivot_quality.py --model CHECKPOINT_DIR --text FILE [--output FILE.jsonl]

FILE is plain text, or JSON lines with a "text" field. Each row is one (input, method); `excess` is ‖R22‖ / ‖R22 of
geqp3‖ - 1, `svd_excess` is ‖R22‖ / (the best rank-k error) - 1, which no choice of columns can bring below 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from harness import provenance
from oneshot_kernels import (
    PivotedFactor,
    gram_,
    grouped_pivots,
    interpolation_from_data,
    interpolation_matrix,
    pivoted_cholesky,
    pivoted_qr,
    sketch_,
    sketched_pivots,
    strong_rrqr_swaps,
    tournament_pivots,
    trailing_error_from_data,
)


def ffn_activations(model_dir: str, text_file: str, num_tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of `down_proj` (fp64 [num_tokens, n]) in the first, middle and last layer, sequences of 1024 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    raw = Path(text_file).read_text(encoding="utf-8")
    if text_file.endswith(".jsonl"):
        raw = "\n\n".join(json.loads(line)["text"] for line in raw.splitlines())
    tokens = AutoTokenizer.from_pretrained(model_dir)(raw[: 8 * num_tokens])["input_ids"][:num_tokens]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    last = len(model.model.layers) - 1
    captured: dict[str, list[torch.Tensor]] = {f"layer {i}": [] for i in (0, last // 2, last)}
    for name, blocks in captured.items():
        layer = model.model.layers[int(name.split()[1])]
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda _module, inputs, blocks=blocks: blocks.append(inputs[0].flatten(0, 1).double())
        )
    with torch.inference_mode():
        for start in range(0, len(tokens), 1024):
            model.model(torch.tensor([tokens[start : start + 1024]]))
    return {name: torch.cat(blocks).clone() for name, blocks in captured.items()}


def kahan(size: int, angle: float = 1.25) -> torch.Tensor:
    """Kahan 1966: diag(1, s, s², …) (I - c · strictly upper ones); greedy pivots keep a needlessly small last pivot."""
    sine, cosine = np.sin(angle), np.cos(angle)
    upper = torch.eye(size, dtype=torch.float64) - cosine * torch.ones(size, size, dtype=torch.float64).triu(1)
    graded = torch.tensor(sine, dtype=torch.float64) ** torch.arange(size)
    return graded.unsqueeze(1) * upper * (1 - 1e-12) ** torch.arange(size)


def bad_inputs(seed: int) -> dict[str, torch.Tensor]:
    """Inputs that are known to be hard for greedy pivots, for Grams or for sketches; see the kernels' READMEs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    base = normal(2048, 384) * torch.logspace(0, -3, 384, dtype=torch.float64)
    duplicated = torch.cat([base, base[:, :64], torch.zeros(2048, 64, dtype=torch.float64)], dim=1)
    spikes = normal(2048, 512)
    spikes[:8] *= 1e4  # a few rows hold nearly all of the norm: coherent
    left, right = torch.linalg.qr(normal(2048, 512))[0], torch.linalg.qr(normal(512, 512))[0]
    return {
        "kahan": kahan(256),
        "duplicated and zero columns": duplicated,
        "graded columns": normal(2048, 512) * torch.logspace(0, -12, 512, dtype=torch.float64),
        "graded spectrum": left * torch.logspace(0, -20, 512, dtype=torch.float64) @ right,
        "coherent spikes": spikes,
    }


def methods(matrix: torch.Tensor, rank: int, seed: int) -> Iterator[tuple[str, Callable[[], PivotedFactor]]]:
    """(name, how) of every way to pivots. Sketched ones return the sketch's pivots."""
    num_columns = matrix.shape[1]
    gram = gram_(torch.zeros(num_columns, num_columns, dtype=torch.float64), matrix)
    single = gram_(torch.zeros(num_columns, num_columns), matrix)

    def sketched(multiple: int, nonzeros: int) -> PivotedFactor:
        out = torch.zeros(multiple * num_columns, num_columns, dtype=torch.float64)
        sketch_(out, matrix, row_offset=0, seed=seed, nonzeros=nonzeros)
        return pivoted_cholesky(out.mT @ out)

    group_size = max(num_columns // 4, 1)
    yield "geqp3", lambda: pivoted_qr(matrix, method="lapack")
    yield "cholesky, fp64 Gram", lambda: pivoted_cholesky(gram)
    yield "cholesky, fp32 Gram", lambda: pivoted_cholesky(single)
    yield "sketched_pivots (fp32)", lambda: sketched_pivots(matrix, seed=seed)
    yield "randomized (BQRRP)", lambda: pivoted_qr(matrix, method="randomized", seed=seed)
    yield "CQRRPT", lambda: pivoted_qr(matrix, method="cqrrpt", seed=seed)
    yield "grouped", lambda: grouped_pivots(gram=gram, group_size=group_size, rank=rank)
    yield "tournament", lambda: tournament_pivots(gram=gram, group_size=group_size, rank=rank)
    yield "cholesky + swaps", lambda: strong_rrqr_swaps(pivoted_cholesky(gram), rank=rank)
    for multiple in (1, 2, 4):
        for nonzeros in (1, 8):
            name = f"sketch {multiple} n, {nonzeros} non-zeros"
            yield name, lambda multiple=multiple, nonzeros=nonzeros: sketched(multiple, nonzeros)


def measure(matrix: torch.Tensor, seed: int) -> list[dict[str, object]]:
    """One row per method at k = n/2. The residual is that of the least-squares T on the data, not a prediction."""
    rank = min(matrix.shape) // 2
    best = float(torch.linalg.svdvals(matrix)[rank:].square().sum().sqrt())
    rows: list[dict[str, object]] = []
    baseline = 0.0
    for name, compute in methods(matrix, rank, seed):
        factor = compute()
        skeleton = factor.pivots[: min(rank, factor.factorised_rank)]
        interpolation = interpolation_from_data(matrix, skeleton)
        error = trailing_error_from_data(matrix, interpolation, skeleton)
        baseline = error if name == "geqp3" else baseline
        predicted = float(interpolation_matrix(factor, rank).abs().max())
        rows.append(
            {
                "method": name,
                "rows": matrix.shape[0],
                "columns": matrix.shape[1],
                "rank": rank,
                "relative_error": error / float(torch.linalg.vector_norm(matrix)),
                "excess": error / baseline - 1 if baseline > 0 else None,
                "svd_excess": error / best - 1 if best > 0 else None,
                "max_interpolation": float(interpolation.abs().max()),
                "max_interpolation_from_factor": predicted,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a dense Llama-like checkpoint")
    parser.add_argument("--text", required=True, help="plain text, or JSON lines with a text field")
    parser.add_argument("--inputs", nargs="+", help="only these inputs (names as printed; default all)")
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", default="benchmarks/results/pivot_quality.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    origin = provenance(seed=arguments.seed)
    inputs = bad_inputs(arguments.seed) | ffn_activations(arguments.model, arguments.text, arguments.tokens)
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    with Path(arguments.output).open("a", encoding="utf-8") as output:
        for name, matrix in inputs.items():
            if arguments.inputs and name not in arguments.inputs:
                continue
            for row in measure(matrix, arguments.seed):
                output.write(json.dumps({"input": name, **row, **origin}) + "\n")
                output.flush()
                excess = row["excess"]
                shown = "" if excess is None else f"{100 * float(str(excess)):+9.3f} % "
                print(f"{name:28} {row['method']:24} {shown} max|T| {row['max_interpolation']:.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
