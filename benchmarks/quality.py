"""Perplexity of SmolLM2-135M at several sizes, beside dense and beside trivial baselines of the same code path.

Every model is calibrated on one text and judged on two kinds that are not the calibration's. Rows go to
`results/quality.jsonl`; `render.py` makes the README's table of them.
"""

import tempfile
import time
from pathlib import Path

import torch
from harness import append_row, lambada_text, parse_settings, parser, perplexities, provenance, smollm2_gguf

from oneshot import CompressionConfig, compress
from oneshot.calibration import load_tokenizer
from oneshot.evaluate import load_windows
from oneshot.source import resolve_checkpoint

RECIPES = ("oneshot", "activation-norm", "magnitude", "random")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--calibration", default="general.jsonl", help="file of the data folder")
    options.add_argument("--num-sequences", type=int, default=128)
    options.add_argument("--sequence-length", type=int, default=1024)
    options.add_argument("--sparsity", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    options.add_argument("--recipes", nargs="+", default=list(RECIPES))
    options.add_argument("--max-windows", type=int, default=8)
    options.add_argument("--no-dense", action="store_true", help="the dense row is there already")
    options.add_argument(
        "--set", nargs="*", default=[], help="further settings, such as correction=two-stream damping=0.1"
    )
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = parse_settings(arguments.set)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense = resolve_checkpoint(str(smollm2_gguf()), folder)
        texts = {
            "wikitext2": arguments.data_dir / "wikitext2_test.txt",
            "lambada": lambada_text(arguments.data_dir, folder),
        }
        tokenizer = load_tokenizer(dense)
        windows = {
            name: load_windows(str(path), tokenizer, sequence_length=1024, max_windows=arguments.max_windows)
            for name, path in texts.items()
        }
        shared = provenance(model="SmolLM2-135M-Instruct", sequence_length=1024, max_windows=arguments.max_windows)
        if not arguments.no_dense:
            append_row(
                "quality", shared | {"recipe": "dense", "sparsity": 0.0, "perplexity": perplexities(dense, windows)}
            )
        for sparsity in arguments.sparsity:
            for recipe in arguments.recipes:
                output = folder / "compressed"
                config = CompressionConfig(
                    checkpoint=str(dense),
                    output=str(output),
                    sparsity=sparsity,
                    recipe=recipe,
                    calibration=str(arguments.data_dir / arguments.calibration),
                    num_sequences=arguments.num_sequences,
                    sequence_length=arguments.sequence_length,
                    overwrite=True,
                    **settings,
                )
                started = time.perf_counter()
                report = compress(config)
                append_row(
                    "quality",
                    shared
                    | {
                        "recipe": recipe,
                        "settings": settings,
                        "sparsity": report.sparsity["reached"],
                        "asked": sparsity,
                        "stored_parameters": report.stored_parameters["compressed"],
                        "block_parameters": report.block_parameters["compressed"],
                        "calibration": arguments.calibration,
                        "calibration_tokens": report.calibration and report.calibration["num_tokens"],
                        "calibration_hash": report.calibration and report.calibration["token_hash"],
                        "seed": config.seed,
                        "seconds": time.perf_counter() - started,
                        "perplexity": perplexities(output, windows),
                    },
                )


if __name__ == "__main__":
    main()
