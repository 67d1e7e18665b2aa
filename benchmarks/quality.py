"""Perplexity of a real model at several sizes, beside dense and beside baselines of the same code path.

Every model is calibrated on one text and judged on five kinds that are not the calibration's, with `--tasks` also on
lm-eval tasks over local files. Some ask for likelihoods; of others the model writes the answer. What the sizes of a
recipe share (the text, a profile) is done once. One row for every recipe, size, form and seed goes to
`results/quality.jsonl`; `render.py` makes tables of them, `plot.py` the plot. The model is SmolLM2-135M, or with
`--model` one of `real_models.py`. Such a model, or any with `--code`, is also judged on Python code, and its rows go
to `results/models.jsonl`.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from harness import (
    OPENED_FORMS,
    RESULTS,
    add_compression_options,
    add_setting_options,
    append_row,
    calibration_files,
    own_settings,
    parse_settings,
    parser,
    provenance,
    read_report,
    read_rows,
    smollm2_gguf,
)
from judging import (
    CODE,
    KINDS,
    TASKS,
    judge,
    judging_windows,
    local_tasks,
    losses,
    retention,
    score,
    task_values,
    text_records,
    text_scores,
)
from real_models import FOLDER as MODELS_FOLDER
from real_models import NAMES, fetch

from oneshot import Config, Report
from oneshot.checkpoint import Checkpoint, locate_checkpoint
from oneshot.config import tcsp_options
from oneshot.evaluation import run_tasks
from oneshot.pipeline import compress, compress_sizes
from oneshot.text import load_tokenizer

RECIPES = ("oneshot", "flap", "activation-norm", "magnitude", "random")


def judge_tasks(model: Path, arguments: argparse.Namespace, include_path: Path) -> dict[str, Any]:
    """A model's results in the tasks, in float32 on the CPU.

    `mean_accuracy` is over the tasks that ask for likelihoods (normalised by length where the task has that),
    `mean_exact_match` over those whose answer the model writes; both only if there are such tasks.
    """
    if not arguments.tasks:
        return {}
    results = run_tasks(
        model,
        arguments.tasks,
        limit=arguments.task_limit,
        include_path=str(include_path),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    row: dict[str, Any] = {"tasks": results, "task_limit": arguments.task_limit, "lm_eval": version("lm-eval")}
    for name, kind in (("mean_accuracy", "chosen"), ("mean_exact_match", "written")):
        values = [value for value, _ in task_values(results, kind).values()]
        if values:
            row[name] = statistics.fmean(values)
    return row


def dense_row(texts: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The newest dense row on the same windows, with the same tasks."""
    for row in reversed(read_rows(rows_name(arguments))):
        if row["recipe"] != "dense" or row.get("texts") != texts:
            continue
        if not arguments.tasks or (
            set(arguments.tasks) <= row.get("tasks", {}).keys() and row["task_limit"] == arguments.task_limit
        ):
            return row
    raise SystemExit(
        f"{RESULTS / rows_name(arguments)}.jsonl has no dense row on these windows and tasks; run without --no-dense."
    )


def rows_name(arguments: argparse.Namespace) -> str:
    """Return the name of the file of rows: SmolLM2 without code has one, and all others share one."""
    return "models" if judges_code(arguments) else "quality"


def judges_code(arguments: argparse.Namespace) -> bool:
    """Return whether Python code is a further kind of text."""
    return arguments.code or arguments.model is not None


def stated(arguments: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """The recipe and its first size, or what TCSP's rates state."""
    if arguments.tcsp is None:
        return {"recipe": recipe, "sparsity": arguments.sparsity[0]}
    options = tcsp_options(*arguments.tcsp)
    options.pop("form", None)  # `--forms` says it
    return options


def result_row(report: Report, settings: dict[str, Any]) -> dict[str, Any]:
    """What a row says of a run: its method, size and time, and the errors of its layers."""
    reached, asked = report.sparsity["reached"], report.sparsity["asked"]
    return {
        "recipe": report.config["recipe"],
        "form": report.config["form"],
        "settings": settings,
        "sparsity": reached,
        "asked": reached if asked is None else asked,
        "seed": report.config["seed"],
        "seconds": report.seconds,
        "layers": report.plan["layers"],
        "errors": [{sublayer.kind: sublayer.measured_error for sublayer in layer.sublayers} for layer in report.layers],
    }


def given_results(folders: list[Path]) -> list[Report]:
    """Reports of results that are there already; other benchmarks may measure the same files."""
    reports = [Report.from_dict(read_report(folder)) for folder in folders]
    return [
        replace(report, config=report.config | {"output": str(folder)})
        for report, folder in zip(reports, folders, strict=True)
    ]


def main() -> None:
    options = parser(__doc__)
    add_compression_options(options, num_sequences=128)
    add_setting_options(options)
    options.add_argument("--calibration", default="general.jsonl", help="files of the data folder or self, with +")
    options.add_argument("--sequence-length", type=int, default=1024)
    options.add_argument("--sparsity", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    options.add_argument("--recipes", nargs="+", default=list(RECIPES))
    options.add_argument("--forms", nargs="+", choices=OPENED_FORMS, default=["stock"])
    options.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the text's order and of random choices")
    options.add_argument(
        "--tcsp", type=float, nargs=2, metavar=("A", "B"), help="rates in place of recipe and sparsity"
    )
    options.add_argument("--profile", help="of the model and the calibration text; made anew in every run without it")
    options.add_argument("--tasks", nargs="+", choices=sorted(path.stem for path in TASKS.glob("*.yaml")), default=[])
    options.add_argument("--results", type=Path, nargs="+", help="judge these results, and compress nothing")
    options.add_argument("--task-limit", type=int, help="at most this many documents of each task")
    options.add_argument("--code", action="store_true", help="judge also on Python code, as with --model")
    options.add_argument("--model", choices=sorted(NAMES), help="of real_models.py (default: SmolLM2-135M)")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = parse_settings(arguments.set)
    if arguments.tcsp is not None:
        arguments.recipes = ["tcsp"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = smollm2_gguf() if arguments.model is None else fetch(arguments.model, MODELS_FOLDER)
        dense = locate_checkpoint(str(source), folder)
        kinds = (*KINDS, CODE) if judges_code(arguments) else tuple(KINDS)
        windows = judging_windows(arguments.data_dir, folder, load_tokenizer(dense), arguments.max_windows, kinds=kinds)
        include_path = local_tasks(arguments.data_dir, folder)
        shared = provenance(
            model=arguments.model or "SmolLM2-135M-Instruct",
            sequence_length=1024,
            max_windows=arguments.max_windows,
            texts=text_records(windows),
        )
        if arguments.no_dense:
            dense_result = dense_row(shared["texts"], arguments)
        else:
            dense_result = {"recipe": "dense", "sparsity": 0.0, "stored_parameters": Checkpoint(dense).num_parameters}
            dense_result |= losses(text_scores([dense], windows)[0]) | judge_tasks(dense, arguments, include_path)
            append_row(rows_name(arguments), shared | dense_result)

        def write_rows(reports: Sequence[Report], stated: dict[str, Any]) -> None:
            for report, measured in zip(reports, judge(reports, windows, dense), strict=True):
                measured |= score(measured["perplexity"], dense_result["perplexity"])
                measured |= judge_tasks(Path(report.config["output"]), arguments, include_path)
                row = result_row(report, stated | own_settings(report.to_dict())) | measured
                append_row(rows_name(arguments), shared | row | retention(measured, dense_result))

        if arguments.results:
            write_rows(given_results(arguments.results), {})
            return
        for recipe, form, seed in itertools.product(arguments.recipes, arguments.forms, arguments.seeds):
            config = Config.of(
                checkpoint=str(dense),
                output=str(folder / "compressed"),
                form=form,
                calibration=calibration_files(arguments.calibration, arguments.data_dir),
                num_sequences=arguments.num_sequences,
                sequence_length=arguments.sequence_length,
                seed=seed,
                overwrite=True,
                profile=arguments.profile,
                **stated(arguments, recipe) | settings,
            )
            by_sizes = arguments.tcsp is not None
            reports = [compress(config)] if by_sizes else compress_sizes(config, arguments.sparsity)
            write_rows(reports, settings if arguments.tcsp is None else settings | {"tcsp": arguments.tcsp})


if __name__ == "__main__":
    main()
