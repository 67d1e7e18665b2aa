"""What is added to a finished result's report, page and card: the check at its end, and later evaluations."""

import logging
import re
from dataclasses import replace
from pathlib import Path

from oneshot.errors import cause
from oneshot.json_text import json_text
from oneshot.machine.durable import alone_in, seal, write_whole
from oneshot.report.card import CARD_NAME, PAGE_NAME, QUALITY, REPORT_NAME, code, escaped, markdown_table
from oneshot.report.page import report_page
from oneshot.report.records import Check, Report
from oneshot.report.sharing import shared_name
from oneshot.report.side_by_side import Comparison
from oneshot.report.words import by_kind

FIRST, LAST = "<!-- evaluations -->", "<!-- end of the evaluations -->"  # of the card's part

logger = logging.getLogger(__name__)


def add_check(folder: Path, report: Report, check: Check) -> Report:
    """Put a check into the report, its page and the card of a result; return the report. Missing files stay missing.

    If another run has replaced the result meanwhile, nothing is written, and the check says so.
    """
    own = identity_of(report)
    seconds = _without_check(report)
    before = report.seconds["total"] - report.seconds.get("check", 0.0)
    seconds |= {"check": check.seconds, "total": before + check.seconds}
    report = replace(
        report,
        check=check,
        seconds=seconds,
        peak_bytes=max(report.peak_bytes, check.peak_bytes),
        peak_device_bytes=max(report.peak_device_bytes, check.peak_device_bytes),
    )
    with alone_in(folder):
        if stored_identity(folder) not in (own, None):
            return replace(report, check=Check(skipped=f"There is no check, because another run replaced {folder}."))
        report = replace(report, evaluations=stored_evaluations(folder))  # of a command beside the check
        _write(folder, report)
        _add_quality(folder / CARD_NAME, check, report.check_warnings)
    return report


def identity_of(report: Report) -> str:
    """Return what tells a run's report from all other runs' reports, whatever is added to it later."""
    seconds = _without_check(report)
    own = replace(report, seconds=seconds, check=None, evaluations=(), peak_bytes=0, peak_device_bytes=0)
    return seal(own.to_dict())


def stored_identity(folder: Path) -> str | None:
    """Return `identity_of` the report of a result; None if it has no report that can be read."""
    report = _stored(folder)
    return None if report is None else identity_of(report)


def _without_check(report: Report) -> dict[str, float]:
    """Return the seconds of a run's own stages."""
    return {stage: spent for stage, spent in report.seconds.items() if stage not in ("check", "total")}


def add_evaluation(folder: Path, evaluation: Comparison, measured: str | None = None) -> bool:
    """Put an evaluation into the report, its page and the card of a result, and return whether it stands there now.

    `measured`: `stored_identity` of the folder before it was evaluated; None: nobody asks.

    It replaces an earlier one of the same models, texts and options. A folder without a report of ours stays as it is,
    and so does one whose report is a link, as in the hub's cache. A warning says why an evaluation is not added.
    """
    path = folder / REPORT_NAME
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with alone_in(folder):
            report = Report.read(path)
            if measured is not None and identity_of(report) != measured:
                logger.warning(
                    "Another run replaced %s meanwhile, so the evaluation is not added to its report.", folder
                )
                return False
            others = tuple(one for one in report.evaluations if not one.repeats(evaluation))
            report = replace(report, evaluations=(*others, evaluation))
            _write(folder, report)
            _add_tables(folder / CARD_NAME, report.evaluations)
    except OSError as error:
        logger.warning("The evaluation is not added to the report in %s (%s); --output keeps it.", folder, cause(error))
        return False
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning(
            "%s is damaged (%s), so the evaluation is not added to it; --output keeps it.", path, cause(error)
        )
        return False
    return True


def stored_evaluations(folder: Path) -> tuple[Comparison, ...]:
    """Return the evaluations in the report of a result; none if it has no report that can be read."""
    report = _stored(folder)
    return () if report is None else report.evaluations


def _stored(folder: Path) -> Report | None:
    try:
        return Report.read(folder / REPORT_NAME)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _write(folder: Path, report: Report) -> None:
    """Write the report and its page again; missing files stay missing."""
    for name, text in ((REPORT_NAME, json_text(report.to_dict()) + "\n"), (PAGE_NAME, report_page(report))):
        if (folder / name).is_file():
            write_whole(folder / name, text)


def _add_quality(path: Path, check: Check, warnings: list[str]) -> None:
    """Put a measured quality into a card, and the warnings of its check; a card without the place for it stays."""
    sentences = []
    if check.perplexity is not None:
        dense, compressed = check.perplexity["dense"], check.perplexity["compressed"]
        sentences.append(
            f"Perplexity on {check.tokens:,} tokens of {code(shared_name(check.source))} that the run did not read: "
            f"{dense:.2f} before, {compressed:.2f} after (× {compressed / dense:.2f})."
        )
    if check.kinds:
        sentences.append(
            f"By kind of text, perplexity ÷ the original's on a few hundred tokens of each: {by_kind(check.ratios)}."
        )
    sentences += warnings
    if sentences and path.is_file():
        line = " ".join(sentences)
        write_whole(path, path.read_text(encoding="utf-8").replace(QUALITY, line, 1))


def _add_tables(path: Path, evaluations: tuple[Comparison, ...]) -> None:
    """Put the tables of evaluations into a card, in the place of those that it has, or at its end."""
    if not path.is_file():
        return
    part = "\n\n".join([FIRST, "## Evaluations", *map(_as_markdown, evaluations), LAST])
    card = path.read_text(encoding="utf-8")
    if FIRST in card and LAST in card:
        card = re.sub(f"{FIRST}.*{LAST}", lambda _: part, card, count=1, flags=re.DOTALL)
    else:
        card = f"{card.rstrip()}\n\n{part}\n"
    write_whole(path, card)


def _as_markdown(evaluation: Comparison) -> str:
    """Return the date, the table and the sentences of an evaluation."""
    headings, *rows = ([escaped(cell) for cell in line] for line in evaluation.table())
    table = markdown_table(headings, rows)
    return "\n\n".join([f"Measured {evaluation.when}:", table, *map(escaped, evaluation.words)])
