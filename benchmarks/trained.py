"""Compress the small models that `train_small.py` trains: a DistilBERT classifier and a T5, judged on their own tasks.

Every variant is calibrated on a part of the examples, once for each seed, which chooses them. One row for each, and one
for each dense model, goes to `results/trained.jsonl`; `render.py` makes the tables of docs/claims.md from them.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import append_row, parser, provenance

from oneshot import Config, compress
from oneshot.evaluation import evaluate

CALIBRATED = 256  # examples
LONGEST = 96  # tokens of an example
HALF_HEADS = {"ffn": "none", "heads": "id", "allocation": "uniform"}  # 4 -> 2 in every layer

# options of `Config.of`, by the name of a variant, by model
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "distilbert": {
        **{f"oneshot {size:.0%}": {"form": "per-layer", "sparsity": size} for size in (0.1, 0.2, 0.3)},
        "oneshot with heads 30%": {"form": "per-layer", "sparsity": 0.3, "heads": "id"},
        "oneshot stock 20%": {"sparsity": 0.2},
        "uncorrected stock 20%": {"sparsity": 0.2, "correction": "none"},
        "random stock 20%": {"sparsity": 0.2, "ffn": "random", "correction": "none"},
        "stat 20%": {"recipe": "stat", "form": "per-layer", "sparsity": 0.2},
        "group-pca 20%": {"recipe": "group-pca", "group_size": 1, "sparsity": 0.2},
        "tcsp 20%": {"recipe": "tcsp", "form": "per-layer", "sparsity": 0.2},
    },
    "t5": {
        **{f"oneshot {size:.0%}": {"sparsity": size} for size in (0.1, 0.2, 0.3)},
        "uncorrected 20%": {"sparsity": 0.2, "correction": "none"},
        "random 20%": {"sparsity": 0.2, "ffn": "random", "correction": "none"},
        "half of the heads": HALF_HEADS | {"sparsity": 0.2},
        "half of the heads, uncorrected": HALF_HEADS | {"sparsity": 0.2, "correction": "none"},
        "heads of 24 of 32": {"ffn": "none", "value_size": 24, "query_key_size": 24},
        "tcsp hidden size 112 of 128": {"recipe": "tcsp", "hidden_size": 112},
    },
}


def main() -> None:
    """Measure the variants of the chosen models."""
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("folder", type=Path, help="what train_small.py wrote")
    options.add_argument("--models", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    for model, seed in itertools.product(arguments.models, arguments.seeds):
        dense, judged = arguments.folder / model, arguments.folder / f"{model}-evaluation.jsonl"
        with tempfile.TemporaryDirectory() as scratch:
            rows, folders = [], []
            for number, (name, settings) in enumerate(VARIANTS[model].items()):
                config = Config.of(
                    str(dense),
                    str(Path(scratch) / str(number)),
                    calibration=str(arguments.folder / f"{model}-calibration.jsonl"),
                    num_sequences=CALIBRATED,
                    sequence_length=LONGEST,
                    seed=seed,
                    dtype="float32",
                    **settings,
                )
                report = compress(config)
                folders.append(config.output)
                row = {"variant": name, "settings": settings, "sparsity": report.sparsity["reached"]}
                rows.append(row | {"tokens": report.calibration["num_tokens"] if report.calibration else 0})
            rows.append({"variant": "dense"})
            results = evaluate(folders, [str(judged)], baseline=str(dense), dtype="float32")
            for row, result in zip(rows, results, strict=True):
                [measures] = result.measures.values()
                row |= {"parameters": result.stored_parameters, "measures": measures}
                append_row("trained", provenance(model=model, seed=seed, **row))


if __name__ == "__main__":
    main()
