"""The end of a run on the terminal: where the result is, how much smaller and how good it is, and what comes next."""

import shlex
import textwrap

from oneshot.errors import printable
from oneshot.report.records import Check, Report
from oneshot.report.terminal import WIDTH
from oneshot.report.words import amount

NAME_WIDTH = 14


def summary(
    report: Report, *, weights: tuple[int | None, int | None], check: Check | None, source: str, gguf: str | None = None
) -> str:
    """Return the summary of a run in lines of at most 80 columns.

    Args:
        weights: bytes of the weight files before and after, None if they are not known.
        check: None without one. source: the checkpoint as it was given. gguf: the result's GGUF file, which llama.cpp
            measures; None if the result has none.
    """
    stored, output = report.stored_parameters, str(report.config["output"])
    removed = 1 - stored["compressed"] / stored["dense"]
    lines = [("result", output)]
    lines.append(("parameters", f"{amount(stored['dense'])} → {amount(stored['compressed'])} (−{removed:.1%})"))
    before, after = weights
    if before is not None and after is not None:
        dtype = str(report.config["save_dtype"])
        stored_as = "" if dtype == "keep" else f", stored as {dtype}"  # a quantised input may be the smaller file
        lines.append(("weight files", f"{before / 1e6:,.0f} MB → {after / 1e6:,.0f} MB{stored_as}"))
    lines.append(("time", f"{report.seconds['total']:,.0f} s, peak memory {report.peak_bytes / 2**30:.2f} GiB"))
    lines += check_lines(check)
    warnings = {*report.warnings, *(warning for layer in report.layers for warning in layer.warnings)}
    lines += [("warning", warning) for warning in sorted(warnings)]
    measures = f"oneshot evaluate {shlex.quote(output)} --baseline {shlex.quote(source)} --text YOUR_TEXT"
    if gguf is not None:
        measures = f"llama-perplexity -m {shlex.quote(gguf)} -f YOUR_TEXT"
    lines.append(("next", measures))
    return "\n".join(_wrapped(name, value) for name, value in lines)


def check_lines(check: Check | None) -> list[tuple[str, str]]:
    """Return the measured quality and the answers; why there is none; nothing without a check."""
    if check is None:
        return []
    lines = []
    if check.perplexity:
        dense, compressed = check.perplexity["dense"], check.perplexity["compressed"]
        measured = f"perplexity {dense:.2f} → {compressed:.2f} (× {compressed / dense:.2f})"
        lines.append(("quality", f"{measured} on {check.tokens:,} tokens of {check.source} that the run did not read"))
    if check.answers:
        lines.append(("asked", check.question))
        lines += [(name, check.answers[key]) for name, key in (("before", "dense"), ("after", "compressed"))]
    if check.skipped:
        lines.append(("asked" if check.perplexity else "quality", check.skipped))
    return lines


def _wrapped(name: str, value: str) -> str:
    indent = " " * NAME_WIDTH
    return "\n".join(
        textwrap.wrap(
            printable(value),
            WIDTH,
            initial_indent=f"{name:{NAME_WIDTH}}",
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        or [f"{name:{NAME_WIDTH}}".rstrip()]
    )
