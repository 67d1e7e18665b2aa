"""The hidden size of SmolLM2-135M by groups of blocks, with and without least squares (SP3's table 9, on our model).

Every row keeps the same width in every group, so that only the sharing of subspaces, and the shortcut matrices that it
costs, differ. Rows go to `results/hidden_size.jsonl`, with the share of every block input that the subspaces leave out,
predicted and, where a dense stream is there, measured.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import (
    add_compression_options,
    add_setting_options,
    append_row,
    parse_settings,
    parser,
    provenance,
    smollm2_gguf,
)
from judging import judge, judging_windows, perplexities

from oneshot import Config
from oneshot.checkpoint import locate_checkpoint
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer

GROUP_SIZES = (0, 1, 2, 4, 8, 15)


def main() -> None:
    options = parser(__doc__)
    add_compression_options(options, num_sequences=16)
    add_setting_options(options)
    options.add_argument("--group-sizes", type=int, nargs="*", default=list(GROUP_SIZES))
    options.add_argument("--corrections", nargs="+", default=["none", "two-stream"])
    options.add_argument("--hidden-size", type=int, default=480)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = parse_settings(arguments.set)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dense = locate_checkpoint(str(smollm2_gguf()), folder)
        windows = judging_windows(
            arguments.data_dir, folder, load_tokenizer(dense), arguments.max_windows, kinds=("wikitext2", "lambada")
        )
        shared = provenance(model="SmolLM2-135M-Instruct", sequence_length=1024, max_windows=arguments.max_windows)
        if not arguments.no_dense:
            append_row("hidden_size", shared | {"group_size": None, "perplexity": perplexities(dense, windows)})
        for group_size in arguments.group_sizes:
            for correction in arguments.corrections:
                varied: dict[str, Any] = {
                    "hidden_size": arguments.hidden_size,
                    "group_size": group_size,
                    "correction": correction,
                }
                config = Config.of(
                    checkpoint=str(dense),
                    output=str(folder / "compressed"),
                    recipe="group-pca",
                    calibration=str(arguments.data_dir / "general.jsonl"),
                    num_sequences=arguments.num_sequences,
                    overwrite=True,
                    **varied | settings,
                )
                report = compress(config)
                inputs = [one for layer in report.layers for one in layer.sublayers if one.kind.endswith("input")]
                row = varied | {
                    "settings": settings,
                    "dense_parameters": report.stored_parameters["dense"],
                    "dense_layer_parameters": report.layer_parameters["dense"],
                    "predicted_error": [one.predicted_error for one in inputs],
                    "measured_error": [one.measured_error for one in inputs],
                }
                [measured] = judge([report], windows, dense)
                append_row("hidden_size", shared | row | measured)


if __name__ == "__main__":
    main()
