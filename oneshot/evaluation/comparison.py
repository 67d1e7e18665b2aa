"""Records of an evaluation, the table on the terminal, and the JSON with its provenance."""

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oneshot.errors import OutputError, printable
from oneshot.json_text import json_text
from oneshot.machine.durable import write_whole
from oneshot.report.provenance import versions
from oneshot.report.side_by_side import Cell, Comparison
from oneshot.report.terminal import WIDTH, open_console
from oneshot.report.words import verdict
from oneshot.text import token_hash

LABELS = {  # of rows in the table, if a field's name is not enough
    "layer_parameters": "parameters in the layers",
    "file_bytes": "bytes of the weight files",
    "flops_per_token": "FLOPs per token (linears)",
    "kv_bytes_per_token": "KV cache bytes per token (16 bit)",
    "prefill_seconds": "seconds of prefill",
    "decode_seconds": "seconds of decoding, per token",
    "perplexity": "perplexity {text} ({tokens:,} tokens)",
    "top1_agreement": "top-1 agreement {text}",
    "kl_divergence": "KL divergence {text} (0: same predictions)",
    "acceptance": "acceptance {text} (as a draft of the baseline)",
    "score": "score: perplexity ÷ baseline's, geometric mean",
    "worst_ratio": "perplexity ÷ baseline's, worst text",
}


STANDARD_ERROR = "_stderr"  # the end of lm-eval's name for the standard error of a metric
PLACES = ("checkpoint", "baseline", "text", "output", "include_path", "debug")  # options that are no setting, or paths


@dataclass(frozen=True)
class TextRecord:
    """The part of a text that was read: windows, their tokens, and the SHA-256 of the int64 tokens."""

    windows: int
    tokens: int
    token_hash: str


@dataclass(frozen=True)
class Evaluation:
    """One model's numbers. Dictionaries are by text; latencies in seconds, medians over rounds.

    Of encoders and encoder–decoders, `measures` has the numbers of every source of examples, and perplexities and the
    KV cache are left out. Sizes of layers are None if the family is not known.
    Beside a baseline, `top1_agreement`, `kl_divergence` and `acceptance` are as in `TextScore`, `score` is the
    geometric mean over the texts of perplexity ÷ the baseline's, `worst_ratio` the largest of these ratios.
    `bos` is the token that the tokenizer puts before every window and before a task's texts, empty if it puts none;
    None for models that are not asked to write.
    `prefill_seconds` is one forward pass over `prefill_tokens` tokens; `decode_seconds` is per generated token.
    """

    checkpoint: str
    stored_parameters: int
    layer_parameters: int | None
    file_bytes: int
    flops_per_token: int | None
    kv_bytes_per_token: int | None
    perplexity: dict[str, float]
    tokens_scored: dict[str, int]
    top1_agreement: dict[str, float] | None = None
    kl_divergence: dict[str, float] | None = None
    acceptance: dict[str, float] | None = None
    score: float | None = None
    worst_ratio: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    tasks: dict[str, dict[str, float]] | None = None
    measures: dict[str, dict[str, float]] | None = None
    texts: dict[str, TextRecord] = field(default_factory=dict)
    bos: str | None = None


def text_record(windows: torch.Tensor) -> TextRecord:
    """Return the record of int64 windows."""
    return TextRecord(len(windows), windows.numel(), token_hash(windows))


def side_by_side(evaluations: Sequence[Evaluation]) -> Comparison:
    """Return the numbers of models with the names of their rows, and what each score means in words."""
    rows = [_rows(evaluation) for evaluation in evaluations]
    words = [_bos_sentence(evaluation) for evaluation in evaluations]
    for one in evaluations:
        if one.score is not None:
            texts = "this text" if len(one.perplexity) == 1 else f"these {len(one.perplexity)} texts"
            meaning = f"perplexity × {one.score:.2f} on {texts}: {verdict(one.score)}."
            words.append(f"{Path(one.checkpoint).name}: {meaning}")
    return Comparison(
        tuple(Path(evaluation.checkpoint).name for evaluation in evaluations),
        {name: tuple(row.get(name) for row in rows) for name in dict.fromkeys(name for row in rows for name in row)},
        tuple(word for word in dict.fromkeys(words) if word),
    )


def print_evaluations(evaluations: Sequence[Evaluation], console: Console | None = None) -> None:
    """Print a table with a column for each model and, for two models, the ratio of the first to the second.

    Below it stands in words what each score means. `console`: None for the terminal's.
    """
    console = console or open_console()
    compared = side_by_side(evaluations)
    headings, *rows = compared.table()
    table = Table(padding=(0, 1), pad_edge=False)
    for number, heading in enumerate(headings):  # as plain text: square brackets in a name are not markup
        table.add_column(Text(printable(heading)), justify="right" if number else "left", overflow="fold")
    for name, *shown in rows:
        table.add_row(Text(printable(name)), *shown)
    console.print(table)
    for sentence in compared.words:
        console.print(Text(printable(sentence)))


class Evaluations(list[Evaluation]):
    """The evaluations of several models, which show as a table in a terminal and in a notebook."""

    def __repr__(self) -> str:
        shown = io.StringIO()
        print_evaluations(self, Console(width=WIDTH, file=shown, color_system=None))
        return shown.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _bos_sentence(evaluation: Evaluation) -> str:
    """Return what stands before texts; nothing if none were read."""
    if evaluation.bos is None or not (evaluation.texts or evaluation.tasks):
        return ""
    if not evaluation.bos:
        return "Texts begin without BOS, as the tokenizer leaves it out."
    return f"Texts begin with the BOS {printable(evaluation.bos)}, as the tokenizer puts it there."


def _rows(evaluation: Evaluation) -> dict[str, Cell]:
    """Return every known number under the name of its row."""
    rows: dict[str, Cell] = {}
    called = short_names([*evaluation.texts, *evaluation.perplexity, *(evaluation.measures or {})])
    for name, value in asdict(evaluation).items():
        if name in ("checkpoint", "tokens_scored", "texts", "bos") or value is None:
            continue
        label = LABELS.get(name, name.replace("_", " "))
        if name == "tasks":
            for task, metrics in value.items():
                rows |= _task_rows(task, metrics)
        elif name == "measures":
            for source, numbers in value.items():
                for number, score in numbers.items():
                    rows[f"{number.replace('_', ' ')} {called[source]}"] = score, None
        elif isinstance(value, dict):
            for text, number in value.items():
                rows[label.format(text=called[text], tokens=evaluation.tokens_scored[text])] = number, None
        else:
            rows[label] = value, None
    return rows


def short_names(texts: Sequence[str]) -> dict[str, str]:
    """Return the last part of every name; a number follows where another text has the same."""
    short: dict[str, str] = {}
    for text in dict.fromkeys(texts):
        name, again = Path(text).name, 1
        while (name if again == 1 else f"{name} ({again})") in short.values():
            again += 1
        short[text] = name if again == 1 else f"{name} ({again})"
    return short


def kept_comparison(evaluations: Sequence[Evaluation], settings: Mapping[str, Any]) -> Comparison:
    """Return the numbers as a report keeps them, with their date, settings, texts and versions.

    `settings`: the options of the command; those that were left out and have no default are None, False or empty.
    """
    texts = evaluations[0].texts
    called = short_names([*texts])
    named = {
        name: value
        for name, value in settings.items()
        if name not in PLACES and value is not None and value is not False and value != []
    }
    return replace(
        side_by_side(evaluations),
        date=_now(),
        settings=named,
        texts={called[text]: asdict(record) for text, record in texts.items()},
        versions=_versions(evaluations),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions(evaluations: Sequence[Evaluation]) -> dict[str, str]:
    return versions() | ({"lm-eval": version("lm-eval")} if any(row.tasks for row in evaluations) else {})


def _task_rows(task: str, metrics: Mapping[str, float]) -> dict[str, Cell]:
    """Return the metrics of a task of lm-eval, whose names are `acc,none` and `acc_stderr,none`."""
    rows: dict[str, Cell] = {}
    for key, value in metrics.items():
        metric, _, used = key.partition(",")
        if not metric.endswith(STANDARD_ERROR):
            label = f"{task} {metric.replace('_', ' ')}" + (f" ({used})" if used not in ("", "none") else "")
            rows[label] = value, metrics.get(f"{metric}{STANDARD_ERROR},{used}")
    return rows


def write_json(path: Path, evaluations: Sequence[Evaluation], settings: Mapping[str, Any]) -> None:
    """Write the numbers and their provenance; the file is complete or absent.

    Raises `OutputError` if the folder cannot be written to.
    """
    texts = evaluations[0].texts if evaluations else {}
    rows = [{name: value for name, value in asdict(row).items() if name != "texts"} for row in evaluations]
    content = {
        "date": _now(),
        "versions": _versions(evaluations),
        "settings": dict(settings),
        "texts": {text: asdict(record) for text, record in texts.items()},
        "evaluations": rows,
    }
    try:
        write_whole(path, json_text(content) + "\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}); give another --output.") from error
