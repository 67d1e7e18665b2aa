"""Claims of the papers on a real decoder: SmolLM2-135M, compressed in many ways and judged on five kinds of text.

Every variant is calibrated on `general.jsonl`, once for each seed, which chooses its sequences. One row for each goes
to `results/claims.jsonl`; `render.py` makes the tables of docs/claims.md from them. The variants of a group and a seed
are judged together, so an interrupted run leaves whole comparisons.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import FFN_CLAIMS, add_compression_options, append_row, parser, provenance, smollm2_gguf
from judging import judge, judging_windows, perplexities, score, text_records

from oneshot import Config
from oneshot.checkpoint import locate_checkpoint
from oneshot.config import tcsp_options
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer

NARROW = {"sparsity": 0.2, "form": "stock"}  # 1536 -> 1024 neurons in every layer
NEURONS = {"form": "per-layer", "embedding": "none", "ranks": "none"}  # no other parts than neurons may shrink
WHOLE_FFN = NEURONS | {"ffn": "none", "allocation": "uniform"}
EQUAL_SIZE = 131_190_000  # stored parameters: values, or queries and keys, of 48 instead of 64 coordinates
OWN_SIZES = NEURONS | {"sparsity": 0.2}
SUBSPACES = {"recipe": "group-pca", "sparsity": 0.1, "round_to": 4}
OWN_WIDTHS = {"allocation": "error"}
ONE_SUBSPACE = tcsp_options(15, 0) | {"form": "per-layer"}  # where the embedding stays tied

# options of `Config.of`, by the name of a variant, by group
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "ffn": {name: NARROW | changes for name, changes in FFN_CLAIMS.items()},
    "inner": {
        "values-48": WHOLE_FFN | {"value_size": 48},
        "queries-and-keys-48": WHOLE_FFN | {"query_key_size": 48},
        "neurons": NEURONS | {"parameters": EQUAL_SIZE, "allocation": "uniform", "round_to": 1},
    },
    "allocation": {name: OWN_SIZES | {"allocation": name} for name in ("uniform", "stat", "sensitivity")},
    "hidden": {
        **{f"groups of {size}": SUBSPACES | {"group_size": size} for size in (1, 2, 4, 8)},
        **{f"groups of {size}, own widths": SUBSPACES | {"group_size": size} | OWN_WIDTHS for size in (1, 8)},
        "one for all": SUBSPACES | {"group_size": 0},
    },
    "tcsp": {
        "15-0": ONE_SUBSPACE,
        "15-15": tcsp_options(15, 15),
        "15-15-corrected": tcsp_options(15, 15) | {"correction": "two-stream"},
    },
    "tokens": {f"{1024 * count}-tokens": ONE_SUBSPACE | {"num_sequences": count} for count in (1, 2, 4, 8, 16)},
}


def main() -> None:
    """Measure the chosen variants."""
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    add_compression_options(options, num_sequences=8)
    options.add_argument("--groups", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense = locate_checkpoint(str(smollm2_gguf()), folder)
        windows = judging_windows(arguments.data_dir, folder, load_tokenizer(dense), arguments.max_windows)
        baseline = perplexities(dense, windows)
        shared = {"model": "SmolLM2-135M-Instruct", "texts": text_records(windows), "dense": baseline}
        for seed, group in itertools.product(arguments.seeds, arguments.groups):
            variants = VARIANTS[group]
            configs = [
                Config.of(
                    str(dense),
                    str(folder / "compressed" / name),
                    calibration=str(arguments.data_dir / "general.jsonl"),
                    sequence_length=1024,
                    seed=seed,
                    overwrite=True,
                    **{"num_sequences": arguments.num_sequences} | changes,
                )
                for name, changes in variants.items()
            ]
            reports = [compress(config) for config in configs]
            for name, report, measured in zip(variants, reports, judge(reports, windows, dense), strict=True):
                row = {"group": group, "variant": name, "seed": seed, "settings": variants[name]}
                row |= {"sparsity": report.sparsity["reached"]} | measured
                append_row("claims", provenance(**shared, **row | score(measured["perplexity"], baseline)))


if __name__ == "__main__":
    main()
