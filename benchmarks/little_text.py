"""Compress from little text, and judge on the first window of five kinds of text and of code, in bfloat16."""

import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import append_row, calibration_files, calibration_record, parse_settings, parser, provenance
from judging import CODE, CPU, KINDS, judging_windows, score, text_records

from oneshot import Config
from oneshot.evaluation import load_model, score_windows
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer


def main() -> None:
    """Write a row to `benchmarks/results/little_text.jsonl` for every seed."""
    options = parser(__doc__)
    options.add_argument("model", type=Path, help="folder of the dense model")
    options.add_argument("--name", required=True, help="of the model in the rows")
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--calibration", default="general.jsonl", help="files of the folder, builtin, self")
    options.add_argument("--num-sequences", type=int, default=16)
    options.add_argument("--sequence-length", type=int, default=256)
    options.add_argument("--window", type=int, default=1024, help="tokens of a judged window")
    options.add_argument("--sparsity", type=float, default=0.2)
    options.add_argument("--form", default="stock")
    options.add_argument("--set", nargs="*", default=[], help="further settings, such as correction=none")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    kinds, settings = (*KINDS, CODE), parse_settings(asked.set)
    calibration = calibration_files(asked.calibration, asked.data_dir)
    with TemporaryDirectory() as temporary:
        folder, tokenizer = Path(temporary), load_tokenizer(asked.model)
        windows = judging_windows(asked.data_dir, folder, tokenizer, 1, kinds=kinds, sequence_length=asked.window)

        def perplexities(model: Path) -> dict[str, float]:
            opened = load_model(model, device=CPU, dtype=torch.bfloat16)
            return {kind: score_windows([opened], ids)[0].perplexity for kind, ids in windows.items()}

        dense = perplexities(asked.model)
        for seed in asked.seeds:
            start, output = time.process_time(), folder / "result"
            config = Config.of(
                asked.model,
                output,
                form=asked.form,
                sparsity=asked.sparsity,
                calibration=calibration,
                num_sequences=asked.num_sequences,
                sequence_length=asked.sequence_length,
                save_dtype="bfloat16",
                seed=seed,
                **settings,
            )
            report = compress(config)
            found = perplexities(output)
            judged = score(found, dense)
            row = provenance(model=asked.name, sequence_length=asked.window, max_windows=1, judged_in="bfloat16")
            row |= {"recipe": config.recipe, "form": asked.form, "asked": asked.sparsity, "seed": seed}
            row |= {"sparsity": report.sparsity["reached"], "settings": settings}
            row |= calibration_record(report.to_dict()) | {"calibration_length": asked.sequence_length}
            row |= {"dtype": str(report.fingerprint["dtype"]).removeprefix("torch."), "windows": text_records(windows)}
            row |= {"ratios": {kind: round(found[kind] / dense[kind], 4) for kind in kinds}}
            row |= {"score": round(judged["score"], 4), "code_ratio": round(judged["code_ratio"], 4)}
            append_row("little_text", row | {"cpu_seconds": round(time.process_time() - start, 1)})
            shutil.rmtree(output)


if __name__ == "__main__":
    main()
