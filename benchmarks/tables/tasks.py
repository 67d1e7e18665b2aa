"""Tables of answers that models write, beside answers chosen by likelihood and beside the tokens that dense accepts."""

from statistics import fmean

from harness import Row, read_rows
from judging import CODE, KINDS, retention, task_values
from quality_rows import quality_rows

from oneshot.report.sharing import told_sources
from tables.cells import markdown, origin, settings, standard_error


def written_table() -> str:
    """Exact match of written answers and mean accuracy of chosen ones, each with its ratio to the dense model's."""
    dense, *compressed = quality_rows(with_tasks=True) or [{}]
    tasks = task_values(dense.get("tasks", {}), "written")
    rows = [row for row in compressed if _same_documents(row, dense, "written")]
    if not tasks or not rows:
        return "Not measured yet."
    chosen = task_values(dense["tasks"], "chosen")
    lines = [
        [
            f"{row['sparsity']:.1%}" if row is not dense else "0",
            row["recipe"],
            row.get("form", "–"),
            settings(row) if row.get("settings") else "–",
            row.get("calibration", "–"),
            *_cells(row, dense, "written", list(tasks)),
            *(_cells(row, dense, "chosen", []) if chosen else []),
        ]
        for row in [dense, *sorted(rows, key=lambda row: (row["asked"], row["score"]))]
    ]
    header = ["stored removed", "method", "form", "settings", "text", *tasks, "mean, written"]
    errors = f"of the written answers' mean {100 * standard_error(tasks):.1f} points"
    likelihoods = ""
    if chosen:
        header.append("mean, chosen")
        errors += f", of the chosen ones' {100 * standard_error(chosen):.1f}"
        likelihoods = f" Chosen by likelihood: {', '.join(chosen)}; a model that guesses keeps half or more of these."
    return markdown(
        header,
        lines,
        "Exact match of answers that the model writes greedily, and accuracy of answers that it chooses by likelihood; "
        f"in brackets the share of the dense model's that is kept.{likelihoods} The first {dense['task_limit']} "
        f"documents of each task; standard error {errors}. {dense['model']}, fp32; {origin([dense, *rows])}.",
    )


def acceptance_table() -> str:
    """Return by form and size what the dense model would accept of a result's tokens, and the sentences it copies."""
    rows = [row for row in read_rows("little_text") if "tasks" in row]
    if not rows:
        return "Not measured yet."
    dense = next(row for row in reversed(rows) if row["recipe"] == "dense")
    newest = {(row["form"], row["asked"]): row for row in rows if row["recipe"] != "dense"}
    lines = [["dense", "0", "1", "1", "1", "1", _copied(dense)]]
    for (form, asked), row in sorted(newest.items()):
        accepted = row["acceptance"]
        cells = [form, f"{asked:.0%}", f"{row['score']:.3f}", f"{row['code_ratio']:.3f}"]
        cells += [f"{fmean(accepted[kind] for kind in KINDS):.2f}", f"{accepted[CODE]:.2f}"]
        lines.append([*cells, _copied(row)])
    last = next(reversed(newest.values()))
    return markdown(
        ["form", "removed", "score", "code", "acceptance", "acceptance of code", "copied sentences"],
        lines,
        "Acceptance: `Σ min(p, q)` of the next token beside the dense model, the mean over the tokens of the first "
        f"window of {last['sequence_length']:,} tokens of each kind of text, and over five kinds; code is Python's "
        "library. Copied sentences are written by the model: exact match on the 48 documents of `oneshot_copy`, "
        f"standard error about 6 points. {last['calibration_tokens']:,} tokens of "
        f"{told_sources(last['calibration'])}, one seed; {dense['model']}, bfloat16; "
        f"{origin([dense, *newest.values()])}.",
    )


def _copied(row: Row) -> str:
    return f"{row['tasks']['oneshot_copy']:.0%}"


def _same_documents(row: Row, dense: Row, kind: str) -> bool:
    """Return whether a row has the dense row's tasks of a kind, on as many documents."""
    own, others = (task_values(one.get("tasks", {}), kind) for one in (row, dense))
    return bool(own) and own.keys() == others.keys() and row["task_limit"] == dense["task_limit"]


def _cells(row: Row, dense: Row, kind: str, shown: list[str]) -> list[str]:
    """The tasks in `shown`, and the mean of all tasks of a kind."""
    if not _same_documents(row, dense, kind):
        return ["–"] * (len(shown) + 1)
    own, others = (task_values(one["tasks"], kind) for one in (row, dense))
    kept = retention(row, dense)["retention"]
    cells = [_cell(own[task][0], kept.get(task)) for task in shown]
    mean, dense_mean = (fmean(value for value, _ in values.values()) for values in (own, others))
    return [*cells, _cell(mean, mean / dense_mean if dense_mean else None)]


def _cell(value: float, kept: float | None) -> str:
    return f"{value:.1%}" if kept is None else f"{value:.1%} ({kept:.0%})"
