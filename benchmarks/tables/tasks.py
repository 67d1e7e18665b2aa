"""Table of answers that models write, beside answers chosen by likelihood."""

from statistics import fmean

from harness import Row
from judging import retention, task_values
from quality_rows import quality_rows

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
