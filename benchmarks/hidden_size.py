"""The hidden size of SmolLM2-135M by groups of blocks, with and without least squares (SP3's table 9, on our model).

Every row keeps the same width in every group, so that only the sharing of subspaces, and the shortcut matrices that it
costs, differ. Rows go to `results/hidden_size.jsonl`, with the share of every block input that the subspaces leave out,
predicted and, where a dense stream is there, measured.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import append_row, lambada_text, parse_settings, parser, perplexities, provenance, smollm2_gguf

from oneshot import CompressionConfig, compress
from oneshot.calibration import load_tokenizer
from oneshot.evaluate import load_windows
from oneshot.source import resolve_checkpoint

GROUP_SIZES = (0, 1, 2, 4, 8, 15)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--group-sizes", type=int, nargs="*", default=list(GROUP_SIZES))
    options.add_argument("--corrections", nargs="+", default=["none", "two-stream"])
    options.add_argument("--hidden-size", type=int, default=480)
    options.add_argument("--num-sequences", type=int, default=16)
    options.add_argument("--max-windows", type=int, default=8)
    options.add_argument("--no-dense", action="store_true", help="the dense row is there already")
    options.add_argument(
        "--set", nargs="*", default=[], help="further settings, such as token_weighting=raw tier=stock"
    )
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = parse_settings(arguments.set)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense = resolve_checkpoint(str(smollm2_gguf()), folder)
        tokenizer = load_tokenizer(dense)
        texts = {
            "wikitext2": arguments.data_dir / "wikitext2_test.txt",
            "lambada": lambada_text(arguments.data_dir, folder),
        }
        windows = {
            name: load_windows(str(path), tokenizer, sequence_length=1024, max_windows=arguments.max_windows)
            for name, path in texts.items()
        }
        shared = provenance(model="SmolLM2-135M-Instruct", sequence_length=1024, max_windows=arguments.max_windows)
        if not arguments.no_dense:
            append_row("hidden_size", shared | {"group_size": None, "perplexity": perplexities(dense, windows)})
        for group_size in arguments.group_sizes:
            for correction in arguments.corrections:
                options_of_run: dict[str, Any] = {
                    "recipe": "group-pca",
                    "hidden_size": arguments.hidden_size,
                    "group_size": group_size,
                    "correction": correction,
                }
                config = CompressionConfig(
                    checkpoint=str(dense),
                    output=str(folder / "compressed"),
                    calibration=str(arguments.data_dir / "general.jsonl"),
                    num_sequences=arguments.num_sequences,
                    overwrite=True,
                    **options_of_run | settings,
                )
                started = time.perf_counter()
                report = compress(config)
                seconds = time.perf_counter() - started
                inputs = [block for layer in report.layers for block in layer.blocks if block.kind.endswith("input")]
                append_row(
                    "hidden_size",
                    shared
                    | {
                        "hidden_size": arguments.hidden_size,
                        "group_size": group_size,
                        "correction": correction,
                        "settings": settings,
                        "stored_parameters": report.stored_parameters["compressed"],
                        "block_parameters": report.block_parameters["compressed"],
                        "dense_parameters": report.stored_parameters["dense"],
                        "dense_block_parameters": report.block_parameters["dense"],
                        "calibration": "general.jsonl",
                        "calibration_tokens": report.calibration and report.calibration["num_tokens"],
                        "calibration_hash": report.calibration and report.calibration["token_hash"],
                        "seconds": seconds,
                        "predicted_error": [block.predicted_error for block in inputs],
                        "measured_error": [block.measured_error for block in inputs],
                        "perplexity": perplexities(folder / "compressed", windows),
                    },
                )


if __name__ == "__main__":
    main()
