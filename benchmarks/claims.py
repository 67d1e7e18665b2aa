"""Claims of the papers on a real decoder: SmolLM2-135M, compressed in many ways and judged on five kinds of text.

Every variant is calibrated on `general.jsonl`, once for each seed, which chooses its sequences. One row for each goes
to `results/claims.jsonl`; `render.py` makes the tables of docs/claims.md from them. The variants of a seed follow each
other, so that an interrupted run leaves whole comparisons.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import (
    FFN_CLAIMS,
    add_compression_options,
    append_row,
    judge,
    judging_windows,
    parser,
    perplexities,
    provenance,
    score,
    smollm2_gguf,
    text_records,
)

from oneshot import Config, compress
from oneshot.checkpoint import locate_checkpoint
from oneshot.config import tcsp_options
from oneshot.text import load_tokenizer

NARROW = {"sparsity": 0.2, "form": "stock"}  # 1536 -> 1024 neurons in every layer
NEURONS = {"form": "per-layer", "embedding": "none", "ranks": "none"}  # no other parts than neurons may shrink
WHOLE_FFN = NEURONS | {"ffn": "none", "allocation": "uniform"}
EQUAL_SIZE = 131_190_000  # stored parameters: values, or queries and keys, of 48 instead of 64 coordinates
OWN_SIZES = NEURONS | {"sparsity": 0.2}
SUBSPACES = {"recipe": "group-pca", "sparsity": 0.1}

# What is measured: a group of comparable variants, a name, and options of `Config.of`.
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"ffn/{name}": NARROW | changes for name, changes in FFN_CLAIMS.items()},
    "inner/values-48": WHOLE_FFN | {"value_size": 48},
    "inner/queries-and-keys-48": WHOLE_FFN | {"query_key_size": 48},
    "inner/neurons": NEURONS | {"parameters": EQUAL_SIZE, "allocation": "uniform", "round_to": 1},
    "allocation/uniform": OWN_SIZES | {"allocation": "uniform"},
    "allocation/stat": OWN_SIZES | {"allocation": "stat"},
    "allocation/stat-reversed": OWN_SIZES | {"allocation": "stat-reversed"},
    "allocation/error": OWN_SIZES | {"allocation": "error"},
    "allocation/sensitivity": OWN_SIZES | {"allocation": "sensitivity"},
    **{f"hidden/group-of-{size}": SUBSPACES | {"group_size": size} for size in (1, 2, 4, 8)},
    "hidden/one-for-all": SUBSPACES | {"group_size": 0},
    "hidden/group-of-8-equal-widths": {"recipe": "group-pca", "hidden_size": 512},
    "tcsp/15-15": tcsp_options(15, 15),
    "tcsp/15-15-corrected": tcsp_options(15, 15) | {"correction": "two-stream"},
    "tcsp/15-0": tcsp_options(15, 0),
}


def main() -> None:
    """Measure the chosen variants."""
    options = parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    add_compression_options(options, num_sequences=8)
    options.add_argument("--variants", nargs="+", default=sorted(VARIANTS), metavar="NAME", help="or their first parts")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = [name for name in VARIANTS if {name, name.split("/")[0]} & set(arguments.variants)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense = locate_checkpoint(str(smollm2_gguf()), folder)
        windows = judging_windows(arguments.data_dir, folder, load_tokenizer(dense), arguments.max_windows)
        baseline = perplexities(dense, windows)
        shared = {"model": "SmolLM2-135M-Instruct", "texts": text_records(windows), "dense": baseline}
        for seed, name in itertools.product(arguments.seeds, chosen):
            config = Config.of(
                str(dense),
                str(folder / "compressed"),
                calibration=str(arguments.data_dir / "general.jsonl"),
                num_sequences=arguments.num_sequences,
                sequence_length=1024,
                seed=seed,
                dtype="float32",
                overwrite=True,
                **VARIANTS[name],
            )
            report = compress(config)
            measured = judge(report, windows, dense)
            row = {"variant": name, "seed": seed, "settings": VARIANTS[name], "sparsity": report.sparsity["reached"]}
            row |= measured | score(measured["perplexity"], baseline)
            append_row("claims", provenance(**shared, **row))


if __name__ == "__main__":
    main()
