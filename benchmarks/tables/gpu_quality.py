"""Tables of the quality of real models, by model, and of ideas that were tried on a GPU."""

from harness import Row, read_rows
from judging import CODE, task_values
from quality_rows import with_seeds

from tables.cells import markdown, score_cell, standard_error
from tables.gpu_measured import made_by, rows_of

MODEL_TITLES = {"gemma-3-270m": "Gemma 3 270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}  # of names of files
QUALITY_KEYS = ("model", "recipe", "form", "calibration", "settings", "asked")  # of a line
RECIPES = {"oneshot": "oneshot", "flap": "FLAP's recipe"}


def _quality_lines() -> list[Row]:
    made = [row for row in rows_of("quality") if row["section"].startswith("quality") and row["recipe"] in RECIPES]
    named = [
        row | {"model": row["model"].removesuffix("-Instruct"), "settings": row.get("settings") or {}} for row in made
    ]
    return with_seeds(named, *QUALITY_KEYS)


def _form(row: Row) -> str:
    """Return the form of a row, or the recipe if it is not ours; families gained output curvature one by one."""
    if row["recipe"] != "oneshot":
        return "FLAP's choice, uncorrected" if row["settings"] else RECIPES[row["recipe"]]
    return row["form"] if row["form"] == "stock" or row["settings"] else f"{row['form']} without output curvature"


def _ratio(row: Row, dense: dict[str, float], kind: str) -> str:
    return f"{row['perplexity'][kind] / dense[kind]:.3f}" if kind in row["perplexity"] else "–"


def by_model_table() -> str:
    """Return the README's table: what the default of the per-layer form loses, one line for a model."""
    rows = [row for row in _default_rows() if row["asked"] in (0.1, 0.2, 0.3)]
    denses = _dense_perplexities()
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = []
    for model in models:
        of = {row["asked"]: row for row in rows if row["model"] == model}
        lines.append(
            [
                MODEL_TITLES.get(model, model),
                *(score_cell(of[size], 3) if size in of else "–" for size in (0.1, 0.2, 0.3)),
                _ratio(of[0.2], denses[str(of[0.2]["texts"])], CODE),
                _accuracy_cell(model, 0.2),
            ]
        )
    counted = sorted({len(row.get("scores", [0])) for row in rows})
    seeds = " or ".join(str(number) for number in counted)
    return markdown(
        ["model", "−10 %", "−20 %", "−30 %", "Python code, −20 %", "accuracy, −20 %"],
        lines,
        "Perplexity ÷ the dense model's, geometric mean over five kinds of text that are not the calibration's; mean ± "
        f"standard deviation over {seeds} seeds. Accuracy: mean over arc_easy, boolq, lambada_openai, piqa and "
        "winogrande (500 documents of each), dense → compressed, one seed. The sizes are shares of the stored "
        "parameters, the embedding "
        "included.",
    )


def _default_rows() -> list[Row]:
    """Rows of the per-layer form by default with the model's own text, one for a model and size: the card's if any."""
    card = [row for row in _quality_lines() if row["settings"] == {"curvature": "fisher"}]
    others = [row for row in read_rows("models") if row.get("settings") == {"curvature": "fisher"}]
    rows = [row for row in card + with_seeds(others, *QUALITY_KEYS) if row["recipe"] == "oneshot"]
    usual = [row for row in rows if row["form"] == "per-layer" and row["calibration"] == "general.jsonl+self"]
    first = {(row["model"], row["asked"]): row for row in reversed(usual)}
    return [row for row in usual if first[row["model"], row["asked"]] is row]


def rows_by_default(model: str) -> list[Row]:
    """Return the rows that every page quotes for a model by default in the per-layer form."""
    return [row for row in _default_rows() if row["model"] == model]


def default_row(model: str, asked: float) -> Row:
    """Return the row that every page quotes for a model and size by default in the per-layer form."""
    [row] = (row for row in rows_by_default(model) if row["asked"] == asked)
    return row


def accuracy(model: str, asked: float, form: str = "per-layer") -> tuple[float, float] | None:
    """Return the mean accuracy over five tasks of the dense model and of the default's result; None if not measured."""
    rows = [row for row in rows_of("tasks") if row["model"].removesuffix("-Instruct") == model and row["form"] == form]
    values = {row["asked"]: row["mean_accuracy"] for row in rows}
    return (values[0.0], values[asked]) if asked in values else None


def _accuracy_cell(model: str, asked: float) -> str:
    measured = accuracy(model, asked)
    return f"{measured[0]:.1%} → {measured[1]:.1%}" if measured else "–"


def _dense_perplexities() -> dict[str, dict[str, float]]:
    """Return the dense model's perplexities by the texts that they were measured on."""
    judged = rows_of("quality") + read_rows("models")
    return {str(row["texts"]): row["perplexity"] for row in judged if row.get("recipe") == "dense"}


def accuracy_table() -> str:
    """Return the mean accuracy over five tasks of every model and form by size, and of every task at −20 %."""
    newest = {(row["model"], row["form"], row["asked"]): row for row in rows_of("tasks")}
    lines = []
    for model, form in dict.fromkeys((model, form) for model, form, _ in newest):
        of = {asked: row for (*key, asked), row in newest.items() if key == [model, form]}
        sizes = [f"{of[size]['mean_accuracy']:.1%}" if size in of else "–" for size in (0.0, 0.1, 0.2, 0.3)]
        values = task_values(of[0.2]["tasks"], "chosen")
        dense = task_values(of[0.0]["tasks"], "chosen")
        each = [f"{dense[task][0]:.1%} → {value:.1%}" for task, (value, _) in values.items()]
        lines.append([model.removesuffix("-Instruct"), form, *sizes, *each])
    first = next(iter(newest.values()))
    error = standard_error(task_values(first["tasks"], "chosen"))
    caption = (
        "Accuracy by lm-eval, length-normalised where the task has that: the mean over five tasks, and each task dense "
        f"→ −20 %. The first {first['task_limit']} documents of each; standard error of a mean {100 * error:.1f} "
        "points. "
        "131,072 tokens of general.jsonl+self, one seed, bfloat16"
    )
    head = ["model", "form", "dense", "−10 %", "−20 %", "−30 %", *task_values(first["tasks"], "chosen")]
    return markdown(head, lines, f"{caption}; {made_by(list(newest.values()))}.")
