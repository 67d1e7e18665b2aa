"""The model card and the files beside the weights that tell of the run."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCardData

from oneshot.architecture import stated_class
from oneshot.config import Kind, own_name
from oneshot.errors import printable
from oneshot.json_text import json_text
from oneshot.report.layer_table import layer_table, size_rows
from oneshot.report.records import Report
from oneshot.report.sharing import is_published, told_sources, without_local_paths
from oneshot.serving import Serving

REPORT_NAME = "oneshot_report.json"
CARD_NAME = "README.md"
PAGE_NAME = "report.html"
CODE_NEEDS = "5.5"  # least transformers that our modelling files run in; each of them checks it
QUALITY = "<!-- quality: not measured -->"  # replaced by `additions.add_check`


class Use(NamedTuple):
    """What a model class is for: transformers' class that opens it, the hub's name of its task, and its kind here."""

    auto_class: str
    task: str
    kind: Kind | None


WRITES = Use("AutoModelForCausalLM", "text-generation", "causal")
USES = {  # by the ending of a class's name, in the order in which they are tried
    "ForCausalLM": WRITES,
    "LMHeadModel": WRITES,
    "ForMaskedLM": Use("AutoModelForMaskedLM", "fill-mask", "masked-lm"),
    "ForSequenceClassification": Use("AutoModelForSequenceClassification", "text-classification", "classification"),
    "ForQuestionAnswering": Use("AutoModelForQuestionAnswering", "question-answering", "question-answering"),
    "ForTokenClassification": Use("AutoModelForTokenClassification", "token-classification", None),
    "ForConditionalGeneration": Use("AutoModelForSeq2SeqLM", "text2text-generation", "text-to-text"),
    "Model": Use("AutoModel", "feature-extraction", "embedding"),
}
READS_IMAGES = Use("AutoModelForImageTextToText", "image-text-to-text", "causal")  # with a decoder's config inside
HUB_TEXTS = {"c4": "allenai/c4", "wikitext2": "Salesforce/wikitext"}


def task_of(config: dict[str, Any]) -> str:
    """Return the hub's name for what the class of a config.json does."""
    stated = stated_class(config) or ""
    if "text_config" in config:
        return READS_IMAGES.task
    return next((use.task for ending, use in USES.items() if stated.endswith(ending)), WRITES.task)


def write_report(
    report: Report, folder: Path, inherited: dict[str, Any], *, title: str, loading: str, usage: str, task: str
) -> None:
    """Write `oneshot_report.json`, `report.html` and the model card.

    Args:
        inherited: metadata of the input's card (`checkpoint.card_metadata`).
        title, loading: sentences about the result's form. usage: a block of code that opens it.
        task: `task_of` its config.json.
    """
    from oneshot.report.page import report_page  # jinja2: only a finished run draws

    (folder / REPORT_NAME).write_text(json_text(report.to_dict()) + "\n")
    (folder / PAGE_NAME).write_text(report_page(report), encoding="utf-8", errors="backslashreplace")
    card = model_card(report, inherited, title=title, loading=loading, usage=usage, task=task)
    (folder / CARD_NAME).write_text(card, encoding="utf-8")


def metadata_of(report: Report, inherited: dict[str, Any], task: str) -> dict[str, Any]:
    """Return the card's metadata: what the hub shows and searches."""
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": ["oneshot", "compressed", "structured-pruning"],
    }
    checkpoint = str(report.config["checkpoint"])
    if is_published(checkpoint):
        metadata["base_model"] = checkpoint
    metadata = metadata | inherited | metadata  # what is compressed is the base, and not what that was made from
    sources = str(report.calibration["source"]).split("+") if report.calibration else []
    hub = [HUB_TEXTS.get(name, name.split(":")[0]) for name in sources]
    hub = [name for name in hub if is_published(name)]
    already = inherited.get("datasets", [])
    datasets = [*([already] if isinstance(already, str) else already), *hub]
    if datasets:
        metadata["datasets"] = list(dict.fromkeys(datasets))
    return metadata


def model_card(report: Report, inherited: dict[str, Any], *, title: str, loading: str, usage: str, task: str) -> str:
    """Return the README.md of the compressed checkpoint; arguments as for `write_report`."""
    report = without_local_paths(report)
    rows = "\n".join(
        f"| {name} | {values['dense']:,} | {values['compressed']:,} |" for name, values in size_rows(report)
    )
    calibration, method = report.calibration, report.method
    text = (
        f"{calibration['num_tokens']:,} tokens of {code(told_sources(str(calibration['source'])))} "
        f"(SHA-256 `{calibration['token_hash']}`)"
        if calibration
        else "none: this recipe only reads weights"
    )
    layers = _layer_section(report)
    warnings = "".join(f"- Warning of the run: {escaped(warning)}\n" for warning in report.all_warnings)
    metadata = ModelCardData(**metadata_of(report, inherited, task)).to_yaml()
    return f"""---
{metadata}
---
# Compressed from {escaped(own_name(str(report.config["checkpoint"])))}

{title}, made smaller in one shot, without training, by `oneshot` {report.versions.get("oneshot", "")}. {loading}
The original's licence and terms of use apply.

{usage}

| | dense | compressed |
|---|---|---|
{rows}

- Recipe: `{report.config["recipe"]}` (FFN `{method["ffn"]}`, heads `{method["heads"]}`, hidden size
  `{method["hidden"]}`, correction `{method["correction"]}`), seed {report.config["seed"]}.
- Calibration text: {text}.{_kept(report)}{_served(report)}
- Weights are stored {_stored_as(report)}.
{warnings}
{QUALITY}

A compressed model answers worse than the original, most of all on text unlike the calibration text. Measure it on
your own task before use. All settings and the error of every layer are in `oneshot_report.json`.
`oneshot compress --config recipe.yaml` makes the model again.
{layers}"""


def python_usage(task: str, *, runs_code: bool = False) -> str:
    """Return a block of code by which transformers opens a result; `runs_code`: with a modelling file beside it."""
    auto = next(use.auto_class for use in (*USES.values(), READS_IMAGES) if use.task == task)
    remote = ", trust_remote_code=True" if runs_code else ""
    needs = f"# needs transformers {CODE_NEEDS} or later\n" if runs_code else ""
    return f"""```python
{needs}from transformers import {auto}, AutoTokenizer

name = "..."  # this folder, or its name on the hub
model = {auto}.from_pretrained(name{remote})
tokenizer = AutoTokenizer.from_pretrained(name{remote})
```"""


def _kept(report: Report) -> str:
    """Return a line on what stayed as it was, because the run was asked to keep it."""
    patterns = report.config["target"].get("keep", ())
    return f"\n- Kept as they were: {', '.join(map(code, patterns))}." if patterns else ""


def _served(report: Report) -> str:
    """Return a line on where the sizes were planned to open."""
    serve = report.config["target"].get("serve")
    return "" if serve is None else f"\n- Sizes were planned to open {Serving.of(serve).words}."


def _layer_section(report: Report) -> str:
    """Return a table of sizes by layer that can be opened; nothing if no layer has a changed size."""
    headings, rows = layer_table(report)
    if not headings:
        return ""
    return f"\n<details><summary>Kept sizes by layer</summary>\n\n{markdown_table(headings, rows)}\n\n</details>\n"


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    """Return a table of cells that are Markdown already."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, ["---"] * len(headings), *rows])


def _stored_as(report: Report) -> str:
    """Return the dtype of the stored weights in words."""
    if has_own_types(report):
        return "in a quantised type of its own for every matrix (`tensor-types.txt`)"
    save_dtype = report.config["save_dtype"]
    dtype = "in the dtype that the original's weights are read as" if save_dtype == "keep" else f"as `{save_dtype}`"
    return dtype if (rounded := quantised_as(report)) is None else f"{dtype}, and {rounded}"


def has_own_types(report: Report) -> bool:
    """Return whether every matrix of a GGUF file has a type of its own."""
    return bool(report.config.get("bits") or report.config["target"].get("gguf_bytes"))


def quantised_as(report: Report) -> str | None:
    """Return what the linears of layers were rounded to, in words; None if they were not."""
    name = report.config.get("quantise")
    if name is None:
        return None
    group = Serving.of(report.config["target"]["serve"]).group if name == "w4a16" else 0
    groups = f" in groups of {group}" if group else ""
    return f"the linears of layers as {name}{groups} (opened with the package compressed-tensors)"


def escaped(text: str) -> str:
    """Return Markdown that shows the text, on one line."""
    return re.sub(r"([\\`*\[\]<>&|])", r"\\\1", printable(text))


def code(text: str) -> str:
    """Return a Markdown code span of the text, with more backticks around it than it has in a row."""
    text = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"
