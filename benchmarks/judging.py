"""Judge models: on windows of five kinds of text, and on tasks over local files."""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Row, calibration_record

from oneshot import Report
from oneshot.checkpoint import Checkpoint, identify
from oneshot.evaluation import TextScore, load_model, load_windows, relative_score, score_windows
from oneshot.evaluation.comparison import text_record
from oneshot.export import stated_shape

TASKS = ROOT / "benchmarks" / "tasks"

# Texts that models are judged on, none of the calibration's kind; results name them so.
KINDS = {
    "wikitext2": "encyclopedia",
    "lambada": "novels",
    "boolq": "web passages",
    "piqa": "how-to dialogue",
    "pydoc": "technical prose",
}

# without `<unk>`, every sixteenth word, whose first token decides the log-loss; no part of a score
ALONE = " alone"  # behind a type that is the only one of a file
WITHOUT_UNKNOWN = "wikitext2-without-unk"
OWN_TYPES = "own types at "  # before the name of llama-quantize's file of equal bytes
CODE = "code"  # a further kind, of Python's own library; it is no part of a score
CODE_MODULES = ("argparse", "calendar", "configparser", "difflib", "heapq", "statistics", "textwrap", "zipfile")


def kind_text(kind: str, data_dir: Path) -> str:
    """A text of one of the `KINDS`, from the data folder or, `pydoc` and `code`, from Python's own library."""
    if kind == CODE:
        return "\n\n".join(inspect.getsource(import_module(name)) for name in CODE_MODULES)
    if kind in ("wikitext2", WITHOUT_UNKNOWN):
        words = (data_dir / "wikitext2_test.txt").read_text()
        return words if kind == "wikitext2" else words.replace(" <unk>", "")
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


def judging_windows(
    data_dir: Path,
    folder: Path,
    tokenizer: Any,
    max_windows: int,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    sequence_length: int = 1024,
) -> dict[str, torch.Tensor]:
    """The first windows of every text that models are judged on; `folder` takes temporary files."""
    windows = {}
    for kind in kinds:
        path = folder / f"{kind}.txt"
        path.write_text(kind_text(kind, data_dir))
        windows[kind] = load_windows(str(path), tokenizer, sequence_length=sequence_length, max_windows=max_windows)
    return windows


def text_records(windows: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Describe the windows that a row was judged on: rows with equal records can be compared."""
    return {name: asdict(text_record(ids)) for name, ids in windows.items()}


def score(perplexities: Mapping[str, float], dense: Mapping[str, float]) -> Row:
    """Geometric mean over the kinds of perplexity ÷ the dense model's, and the kind where this ratio is worst.

    Code stays outside of the mean, and has a ratio of its own.
    """
    mean, worst, ratio = relative_score({kind: value for kind, value in perplexities.items() if kind != CODE}, dense)
    code = {"code_ratio": perplexities[CODE] / dense[CODE]} if CODE in perplexities else {}
    return {"score": mean, "worst": worst, "worst_ratio": ratio} | code


CPU = torch.device("cpu")


def judge(
    reports: Sequence[Report], windows: dict[str, torch.Tensor], dense: Path, *, device: torch.device = CPU
) -> list[dict[str, Any]]:
    """The rows' records of compressed models: size, calibration, perplexities, and how like the dense model each is.

    `top1_agreement`, `kl_divergence` (nats per token) and `acceptance` are of the next token, on every text.
    `flops_ratio` is of the layers, with attention's products, for the mean token of a window (STAT section 4).
    """
    records = []
    outputs = [Path(report.config["output"]) for report in reports]
    scores_of_all = text_scores(outputs, windows, baseline=dense, device=device)
    for report, output, scores in zip(reports, outputs, scores_of_all, strict=True):
        sizes = {
            "stored_parameters": report.stored_parameters["compressed"],
            "layer_parameters": report.layer_parameters["compressed"],
            "flops_ratio": flops_ratio(output, dense, next(iter(windows.values())).shape[1]),
        }
        measures = ("top1_agreement", "kl_divergence", "acceptance")
        likeness = {measure: {name: getattr(one, measure) for name, one in scores.items()} for measure in measures}
        records.append(sizes | calibration_record(report.to_dict()) | losses(scores) | likeness)
    return records


def text_scores(
    folders: Sequence[Path],
    windows: dict[str, torch.Tensor],
    *,
    baseline: Path | None = None,
    device: torch.device = CPU,
) -> list[dict[str, TextScore]]:
    """Score models on every text, in float32; all are in memory together."""
    dtype = torch.float32
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


def perplexities(folder: Path, windows: dict[str, torch.Tensor]) -> dict[str, float]:
    """A model's perplexity on every text, in float32 on the CPU."""
    return {name: one.perplexity for name, one in text_scores([folder], windows)[0].items()}


@torch.inference_mode()
def model_losses(model: Any, windows: Mapping[str, torch.Tensor]) -> Row:
    """A row's perplexities and window losses of a model in memory."""
    return losses({name: score_windows([model], ids)[0] for name, ids in windows.items()})


TASKS_OF_LIKELIHOODS = ("arc_easy", "boolq", "lambada_openai", "piqa", "winogrande")
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
