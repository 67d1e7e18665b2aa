"""Tables of the quality of real models, by model, and of ideas that were tried on a GPU."""

from harness import Row, read_rows
from judging import CODE, task_values
from quality_rows import quality_rows, with_seeds

from tables.cells import markdown, score_cell, standard_error
from tables.gpu_measured import made_by, rows_of

# of names of files; the coder as it was published, with one table
MODEL_TITLES = {"gemma-3-270m": "Gemma 3 270M", "qwen2.5-coder-0.5b-tied": "Qwen2.5-Coder-0.5B"}
QUALITY_KEYS = ("model", "recipe", "form", "calibration", "settings", "asked")  # of a line
RECIPES = {"oneshot": "oneshot", "flap": "FLAP's recipe"}
TOKENS, FEWEST_TOKENS = 131_072, 65_536  # of calibration: by default, and where a row counts as the default's
WINDOWS, DOCUMENTS = 4, 500  # of each text and task


def _quality_lines() -> list[Row]:
    made = [row for row in rows_of("quality") if row["section"].startswith("quality") and row["recipe"] in RECIPES]
    named = [row | {"model": _title(row), "settings": row.get("settings") or {}} for row in made]
    return with_seeds(named, *QUALITY_KEYS)


def _title(row: Row) -> str:
    return MODEL_TITLES.get(row["model"], row["model"].removesuffix("-Instruct"))


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
    lines, of_cards = [], []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {row["asked"]: row for row in rows if row["model"] == model}
        of_cards += [model] if _is_of_card(of[0.2]) else []
        lines.append(
            [
                model,
                f"{of[0.2]['calibration_tokens']:,}",
                *(score_cell(of[size], 3) if size in of else "–" for size in (0.1, 0.2, 0.3)),
                _code_cell(model, of[0.2]),
                _accuracy_cell(model, 0.2),
            ]
        )
    counts = [len(row.get("scores", [row])) for row in rows]
    older = f" {' and '.join(of_cards)}: on a GPU, with older code." if of_cards else ""
    return markdown(
        ["model", "tokens", "−10 %", "−20 %", "−30 %", "Python code, −20 %", "accuracy, −20 %"],
        lines,
        "Perplexity ÷ the dense model's, geometric mean over five kinds of text that are not the calibration's; mean ± "
        f"standard deviation over {min(counts)} to {max(counts)} seeds. Tokens: of calibration. Accuracy: mean over "
        f"arc_easy, boolq, lambada_openai, piqa and winogrande ({DOCUMENTS} documents of each), dense → compressed, "
        f"one seed. The sizes are shares of the stored parameters, the embedding included.{older}",
    )


def _default_rows() -> list[Row]:
    """Return the rows of the per-layer form by default, with the model's own text: a model's newest text and code.

    A card's rows have older code, so they count only for models that no CPU has compressed.
    """
    rows = [*filter(_is_of_card, rows_at_equal_tokens()), *_rows_of_cpus()]
    newest = {row["model"]: _source(row) for row in rows}
    return [row for model in newest for row in rows if (row["model"], _source(row)) == (model, newest[model])]


def _source(row: Row) -> tuple[bool, int]:
    return _is_of_card(row), row["calibration_tokens"]


def _is_of_card(row: Row) -> bool:
    return "date" not in row  # the rows of CPUs have one


def _rows_of_cpus() -> list[Row]:
    rows = [row for row in _rows_of_models() if row["model"] in MODEL_TITLES and row["max_windows"] == WINDOWS]
    rows = with_seeds(rows, *QUALITY_KEYS, "calibration_tokens") + quality_rows()[1:]
    named = [row | {"model": _title(row)} for row in rows]
    return [row for row in named if _is_usual(row) and FEWEST_TOKENS <= row["calibration_tokens"] <= TOKENS]


def _rows_of_models() -> list[Row]:
    return [row for row in read_rows("models") if row["recipe"] == "oneshot"]


def _is_usual(row: Row) -> bool:
    usual = {"recipe": "oneshot", "form": "per-layer", "calibration": "general.jsonl+self"}
    return (usual | {"settings": {"curvature": "fisher"}}).items() <= row.items()


def rows_at_equal_tokens() -> list[Row]:
    """Return the same rows with equal tokens for every model, of one code: a card's rows, and older ones of CPUs."""
    older = [row for row in _rows_of_models() if row["calibration_tokens"] == TOKENS]
    of_others = with_seeds([row for row in older if row["model"] in MODEL_TITLES], *QUALITY_KEYS)
    rows = [row for row in _quality_lines() + of_others if _is_usual(row)]
    first = {(row["model"], row["asked"]): row for row in reversed(rows)}
    return [row for row in rows if first[row["model"], row["asked"]] is row]


def rows_by_default(model: str) -> list[Row]:
    """Return the rows that every page quotes for a model by default in the per-layer form."""
    return [row for row in _default_rows() if row["model"] == model]


def default_row(model: str, asked: float) -> Row:
    """Return the row that every page quotes for a model and size by default in the per-layer form."""
    [row] = (row for row in rows_by_default(model) if row["asked"] == asked)
    return row


def accuracy(model: str, asked: float) -> tuple[float, float] | None:
    """Return the mean accuracy over five tasks of the dense model and of the default's result; None if not measured."""
    if _is_of_card(default_row(model, asked)):
        rows = [row for row in rows_of("tasks") if row["form"] == "per-layer"]
    else:
        rows = [row for row in read_rows("models") if row.get("task_limit") == DOCUMENTS]
    values = {row.get("asked", 0.0): row["mean_accuracy"] for row in rows if _title(row) == model}
    return (values[0.0], values[asked]) if asked in values else None


def _accuracy_cell(model: str, asked: float) -> str:
    measured = accuracy(model, asked)
    return f"{measured[0]:.1%} → {measured[1]:.1%}" if measured else "–"


def _code_cell(model: str, row: Row) -> str:
    """Return the ratio on Python code, which rows of `quality.jsonl` do not have: a row of the same result has it."""
    if CODE in row["perplexity"]:
        return _ratio(row, _dense_perplexities()[str(row["texts"])], CODE)
    same = {"asked": row["asked"], "seed": row["seed"], "calibration_hash": row["calibration_hash"]}
    ratios = [one["code_ratio"] for one in _rows_of_models() if "code_ratio" in one and same.items() <= one.items()]
    return f"{ratios[-1]:.3f}" if ratios else "–"


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
