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

from oneshot import Config
from oneshot.evaluation import evaluate
from oneshot.pipeline import compress

CALIBRATION_TOKENS = 6_000
LONGEST = 96  # tokens of an example
NARROW = {"round_to": 64, "allocation": "uniform", "form": "stock"}
RECIPES = ("oneshot", "stat", "group-pca", "tcsp")
TWO_HEADS = {"ffn": "none", "heads": "id", "sparsity": 0.2}  # of 4

# options of `Config.of`, by the name of a variant, by model
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "distilbert": {
        **{f"{recipe} 30%": {"recipe": recipe, "form": "per-layer", "sparsity": 0.3} for recipe in RECIPES},
        "oneshot with heads 40%": {"form": "per-layer", "sparsity": 0.4, "heads": "id"},
        "64 of 512 neurons": NARROW | {"sparsity": 0.3},
        "64 neurons, uncorrected": NARROW | {"sparsity": 0.3, "correction": "none"},
        "64 random neurons": NARROW | {"sparsity": 0.3, "ffn": "random"},
        "own subspaces of 64 of 128": {"recipe": "group-pca", "group_size": 1, "hidden_size": 64},
        "one subspace of 64": {"recipe": "tcsp", "form": "per-layer", "hidden_size": 64},
    },
    "t5": {
        "oneshot 30%": {"sparsity": 0.3},
        "oneshot 45%": {"sparsity": 0.45},
        "45%, uncorrected": {"sparsity": 0.45, "correction": "none"},
        "45%, random neurons": {"sparsity": 0.45, "ffn": "random"},
        "stat 30%": {"recipe": "stat", "sparsity": 0.3},
        "2 of 4 heads": TWO_HEADS,
        "2 heads, uncorrected": TWO_HEADS | {"correction": "none"},
        "heads of 16 of 32": {"ffn": "none", "value_size": 16, "query_key_size": 16},
        "hidden size 96 of 128": {"recipe": "tcsp", "hidden_size": 96},
        "hidden size 96, corrected": {"recipe": "tcsp", "hidden_size": 96, "correction": "two-stream"},
        "hidden size 64 of 128": {"recipe": "tcsp", "hidden_size": 64},
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
                    num_sequences=CALIBRATION_TOKENS // LONGEST,
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
