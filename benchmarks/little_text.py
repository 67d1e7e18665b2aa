"""Compress from little text, and judge in bfloat16: the first windows of five kinds of text and of code, and tasks.

Rows also have the share of tokens that the dense model would accept of the compressed one in speculative decoding.
"""

import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import Row, append_row, calibration_files, calibration_record, parse_settings, parser, provenance
from judging import CODE, CPU, KINDS, judging_windows, score, task_values, text_records

from oneshot import Config
from oneshot.evaluation import TextScore, load_model, run_tasks, score_windows
from oneshot.pipeline import compress_sizes
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
    options.add_argument("--max-windows", type=int, default=1, help="that are judged, of each kind")
    options.add_argument("--sparsity", type=float, nargs="+", default=[0.2], help="all sizes share a profile")
    options.add_argument("--form", default="stock")
    options.add_argument("--set", nargs="*", default=[], help="further settings, such as correction=none")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--tasks", nargs="+", default=[], help="of lm-eval or of the package, such as oneshot_copy")
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    kinds, settings = (*KINDS, CODE), parse_settings(asked.set)
    calibration = calibration_files(asked.calibration, asked.data_dir)
    with TemporaryDirectory() as temporary:
        folder, tokenizer = Path(temporary), load_tokenizer(asked.model)
        windows = judging_windows(
            asked.data_dir, folder, tokenizer, asked.max_windows, kinds=kinds, sequence_length=asked.window
        )
        original = load_model(asked.model, device=CPU, dtype=torch.bfloat16)

        def scores(model: Path) -> dict[str, TextScore]:
            opened = load_model(model, device=CPU, dtype=torch.bfloat16)
            return {kind: score_windows([opened], ids, baseline=original)[0] for kind, ids in windows.items()}

        def answers(model: Path) -> Row:
            if not asked.tasks:
                return {}
            found = run_tasks(model, asked.tasks, limit=None, include_path=None, device=CPU, dtype=torch.bfloat16)
            kinds = {kind: task_values(found, kind) for kind in ("chosen", "written")}
            return {"tasks": {task: value for kind in kinds.values() for task, (value, _) in kind.items()}}

        dense = {kind: score_windows([original], ids)[0].perplexity for kind, ids in windows.items()}
        shared = provenance(
            model=asked.name, sequence_length=asked.window, max_windows=asked.max_windows, judged_in="bfloat16"
        )
        shared |= {"windows": text_records(windows)}
        if asked.tasks:
            append_row("little_text", shared | {"recipe": "dense", "perplexity": dense} | answers(asked.model))
        for seed in asked.seeds:
            start = time.process_time()
            config = Config.of(
                asked.model,
                folder / "results",
                form=asked.form,
                sparsity=asked.sparsity[0],
                calibration=calibration,
                num_sequences=asked.num_sequences,
                sequence_length=asked.sequence_length,
                save_dtype="bfloat16",
                seed=seed,
                **settings,
            )
            reports = compress_sizes(config, asked.sparsity)
            seconds = time.process_time() - start
            for report in reports:
                output = Path(report.config["output"])
                found = scores(output)
                judged = score({kind: one.perplexity for kind, one in found.items()}, dense)
                row = shared | {"recipe": config.recipe, "form": asked.form, "seed": seed, "settings": settings}
                row |= {"asked": report.sparsity["asked"], "sparsity": report.sparsity["reached"]}
                row |= calibration_record(report.to_dict()) | {"calibration_length": asked.sequence_length}
                row |= {"dtype": str(report.fingerprint["dtype"]).removeprefix("torch.")}
                row |= {"ratios": {kind: round(found[kind].perplexity / dense[kind], 4) for kind in kinds}}
                row |= {"score": round(judged["score"], 4), "code_ratio": round(judged["code_ratio"], 4)}
                row |= {"acceptance": {kind: round(one.acceptance or 0.0, 4) for kind, one in found.items()}}
                append_row("little_text", row | answers(output) | {"cpu_seconds": round(seconds, 1)})
            shutil.rmtree(folder / "results")


if __name__ == "__main__":
    main()
