"""One choice of size and types (`--max-file-size` alone) beside types alone and stated shares, at equal bytes.

The model is a dense folder of the Llama type off any quantised grid (see `tensor_types.py`). All results plan from one
profile. One row for each file goes to `size_and_types.jsonl`. A file that is there is not made again.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import append_row, calibration_record, parser, provenance
from judging import CODE, KINDS, judging_windows, losses, text_records, text_scores

from oneshot import Config, OneshotError, Report, pipeline
from oneshot.export import open_folder
from oneshot.report.card import REPORT_NAME
from oneshot.text import load_tokenizer

FREE = "free"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True, help="dense folder")
    options.add_argument("--name", required=True, help="of the model, for the rows")
    options.add_argument("--calibration", required=True)
    options.add_argument("--profile", type=Path, required=True, help="of this text")
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--folder", type=Path, required=True, help="for files")
    options.add_argument("--num-sequences", type=int, default=16)
    options.add_argument("--sequence-length", type=int, default=512)
    options.add_argument("--max-windows", type=int, default=4)
    options.add_argument("--sizes", nargs="+", default=["88MB", "78MB", "70MB", "62MB"])
    options.add_argument("--sparsities", nargs="+", default=[FREE, "0"], help="shares, or free")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    price = pipeline.price_original
    pipeline.price_original = cache(lambda *given, **_: price(*given, advance=lambda _: None, rounds=lambda: None))
    base = Config.of(
        arguments.model,
        form="gguf",
        max_file_size="1GB",
        calibration=arguments.calibration,
        num_sequences=arguments.num_sequences,
        sequence_length=arguments.sequence_length,
        profile=str(arguments.profile),
        dtype="float32",
    )
    scratch = arguments.folder / "scratch"
    with TemporaryDirectory() as texts:
        windows = judging_windows(
            arguments.data_dir,
            Path(texts),
            load_tokenizer(arguments.model),
            arguments.max_windows,
            kinds=(*KINDS, CODE),
            sequence_length=arguments.sequence_length,
        )
    [dense] = text_scores([arguments.model], windows)
    for size in arguments.sizes:
        for sparsity in arguments.sparsities:
            output = arguments.folder / f"{size}-{sparsity}"
            target = replace(
                base.target,
                gguf_bytes=Config.of("model", form="gguf", max_file_size=size).target.gguf_bytes,
                sparsity=None if sparsity == FREE else float(sparsity),
            )
            config = replace(base, target=target, output=str(output))
            if output.exists():
                report = Report.from_dict(json.loads((output / REPORT_NAME).read_text()))
            else:
                try:
                    report = pipeline.compress(config, show_progress=True)
                except OneshotError as error:  # types alone are not so small
                    print(size, sparsity, error)
                    continue
            scratch.mkdir(exist_ok=True)
            [scores] = text_scores([open_folder(str(output), scratch)], windows)
            append_row(
                "size_and_types",
                {
                    "model": arguments.name,
                    "size": size,
                    "asked": sparsity,
                    "file_bytes": (output / "model.gguf").stat().st_size,
                    "sparsity": report.sparsity["reached"],
                    "texts": text_records(windows),
                    "dense_perplexity": losses(dense)["perplexity"],
                    **losses(scores),
                    **calibration_record(report.to_dict()),
                    **provenance(),
                },
            )


if __name__ == "__main__":
    main()
