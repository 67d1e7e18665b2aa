"""Tables of the quality of real models, by model, and of ideas that were tried on a GPU."""

from compare import compare_rows
from harness import Row, read_rows
from judging import CODE, KINDS
from quality_rows import with_seeds

from tables.cells import difference_cells, markdown, score_cell, settings
from tables.gpu_measured import GB, NOT_YET, STAGES, made_by, rows_of

MODEL_TITLES = {"gemma-3-270m": "Gemma 3 270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}  # of names of files
QUALITY_KEYS = ("model", "recipe", "form", "calibration", "settings", "asked")  # of a line
RECIPES = {"oneshot": "oneshot", "flap": "FLAP's recipe"}


def gpu_quality_table() -> str:
    """Score of real models that were compressed on the card; several seeds are joined."""
    rows = _quality_lines()
    if not rows:
        return NOT_YET
    lines = [
        [
            row["model"],
            _form(row),
            row["calibration"],
            f"−{row['asked']:.0%}",
            settings(row) or "–",
            score_cell(row, 3),
            f"{row['worst_ratio']:.3f} ({row['worst']})",
            str(len(row.get("scores", [0]))),
            *("–" if "at_once" in row else f"{row['seconds'].get(stage, 0.0):.1f}" for stage in STAGES),
            f"{row['peak_device_bytes'] / GB:.1f} GB",
        ]
        for row in rows
    ]
    head = ["model", "form", "text", "size", "settings", "score", "worst kind", "seeds", *STAGES, "device peak"]
    caption = (
        "The first size of a run pays for what all share; seconds by stage of the first seed, none where runs shared "
        "the card"
    )
    return markdown(head, lines, f"{caption}; {made_by(rows)}.")


def _quality_lines() -> list[Row]:
    made = [row for row in rows_of("quality") if row["section"].startswith("quality") and row["recipe"] in RECIPES]
    named = [
        row | {"model": row["model"].removesuffix("-Instruct"), "settings": row.get("settings") or {}} for row in made
    ]
    return with_seeds(named, *QUALITY_KEYS)


def models_table(*, per_layer_only: bool = False) -> str:
    """Return the loss on every kind of text, by model, form and size, of results that a card or a CPU made."""
    others = read_rows("models")
    made = [row for row in others if row["recipe"] in RECIPES]
    # without curvature the per-layer form is older
    own = [row for row in _quality_lines() if row["settings"] or row["form"] == "stock"]
    rows = own + with_seeds(made, *QUALITY_KEYS)
    if per_layer_only:
        rows = [row for row in rows if row["recipe"] == "oneshot" and row["form"] == "per-layer"]
    judged = rows_of("quality") + others
    denses = {str(row["texts"]): row["perplexity"] for row in judged if row.get("recipe") == "dense"}
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["perplexity"]))
    titles = {id(row): MODEL_TITLES.get(row["model"], row["model"]) for row in rows}
    order = list(dict.fromkeys(titles.values()))
    forms = ["per-layer", "stock"]
    rows.sort(key=lambda row: (order.index(titles[id(row)]), forms.index(row["form"]), row["asked"]))
    lines = [
        [
            titles[id(row)],
            _form(row),
            row["calibration"].removeprefix("general.jsonl") or "–",
            f"−{row['asked']:.0%}",
            f"**{score_cell(row, 3)}**",
            *(_ratio(row, denses[str(row["texts"])], kind) for kind in kinds),
            f"CPU, {row['max_windows']}" if "max_windows" in row else "H100, 16",
        ]
        for row in rows
    ]
    names = {**KINDS, CODE: "Python code"}
    head = ["model", "form", "text", "stored parameters", "score", *(names[kind] for kind in kinds), "made on, windows"]
    caption = (
        "Perplexity ÷ the dense model's; the score is the geometric mean of the first five; general.jsonl, and where "
        "the text says so as much of the model's own (`+self`). In bfloat16 on an H100, in float32 on a CPU, each "
        "judged on so many windows of a text"
    )
    seeds = sorted({str(len(row["scores"])) for row in rows if "scores" in row})
    caption += f"; ± is the standard deviation over {' or '.join(seeds)} seeds" if seeds else ""
    return markdown(head, lines, f"{caption}; {made_by(rows)}.")


def _form(row: Row) -> str:
    """Return the form of a row, or the recipe if it is not ours; families gained output curvature one by one."""
    if row["recipe"] != "oneshot":
        return "FLAP's choice, uncorrected" if row["settings"] else RECIPES[row["recipe"]]
    return row["form"] if row["form"] == "stock" or row["settings"] else f"{row['form']} without output curvature"


def _ratio(row: Row, dense: dict[str, float], kind: str) -> str:
    return f"{row['perplexity'][kind] / dense[kind]:.3f}" if kind in row["perplexity"] else "–"


def ideas_table() -> str:
    """Every use of output curvature by itself, and ideas beside it: scores over seeds and the paired change."""
    rows = rows_of("idea")
    usual = min(row["calibration_tokens"] for row in rows)
    default = [row for row in rows if row["idea"] == "default" and row["calibration_tokens"] == usual]
    lines = []
    for row in with_seeds(rows, "idea", "calibration_tokens"):
        same = [one for one in rows if all(one[key] == row[key] for key in ("idea", "calibration_tokens"))]
        times = row["calibration_tokens"] / usual
        name = row["idea"] if times == 1 else f"{row['idea']}, {times:g} times the text"
        is_default = name == "default"
        change = ["–"] * 4 if is_default else difference_cells(compare_rows(same, default))
        lines.append([name, score_cell(row, 3), *change])
    head = ["what differs", "score", "change of the score", "95% interval", "p", "change by seed"]
    caption = (
        f"Per-layer, −{default[0]['asked']:.0%}, {usual:,} tokens of general.jsonl+self, bfloat16; SmolLM2-135M, 16 "
        "windows of each of five kinds of text. Scores: mean ± standard deviation over the seeds. The change is paired "
        "with the default of the same seed on the same text, except with more text"
    )
    return markdown(head, lines, f"{caption}; {made_by(rows)}.")
