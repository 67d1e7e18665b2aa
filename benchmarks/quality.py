"""Perplexity of SmolLM2-135M at several sizes, beside dense and beside trivial baselines of the same code path.

Every model is calibrated on one text and judged on two kinds that are not the calibration's. Rows go to
`results/quality.jsonl`; `render.py` makes the README's table of them.
"""

import tempfile
from pathlib import Path

import torch
from harness import (
    add_compression_options,
    add_setting_options,
    append_row,
    compress_and_judge,
    judging_windows,
    parse_settings,
    parser,
    perplexities,
    provenance,
    smollm2_gguf,
)

from oneshot import CompressionConfig
from oneshot.calibration import load_tokenizer
from oneshot.source import resolve_checkpoint

RECIPES = ("oneshot", "activation-norm", "magnitude", "random")


def main() -> None:
    options = parser(__doc__)
    add_compression_options(options, num_sequences=128)
    add_setting_options(options)
    options.add_argument("--calibration", default="general.jsonl", help="file of the data folder")
    options.add_argument("--sequence-length", type=int, default=1024)
    options.add_argument("--sparsity", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    options.add_argument("--recipes", nargs="+", default=list(RECIPES))
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = parse_settings(arguments.set)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense = resolve_checkpoint(str(smollm2_gguf()), folder)
        windows = judging_windows(arguments.data_dir, folder, load_tokenizer(dense), arguments.max_windows)
        shared = provenance(model="SmolLM2-135M-Instruct", sequence_length=1024, max_windows=arguments.max_windows)
        if not arguments.no_dense:
            append_row(
                "quality", shared | {"recipe": "dense", "sparsity": 0.0, "perplexity": perplexities(dense, windows)}
            )
        for sparsity in arguments.sparsity:
            for recipe in arguments.recipes:
                config = CompressionConfig(
                    checkpoint=str(dense),
                    output=str(folder / "compressed"),
                    sparsity=sparsity,
                    recipe=recipe,
                    calibration=str(arguments.data_dir / arguments.calibration),
                    num_sequences=arguments.num_sequences,
                    sequence_length=arguments.sequence_length,
                    overwrite=True,
                    **settings,
                )
                report, measured = compress_and_judge(config, windows)
                row = {
                    "recipe": recipe,
                    "settings": settings,
                    "sparsity": report.sparsity["reached"],
                    "asked": sparsity,
                    "seed": config.seed,
                }
                append_row("quality", shared | row | measured)


if __name__ == "__main__":
    main()
