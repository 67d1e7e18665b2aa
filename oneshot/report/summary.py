"""The end of a run on the terminal: where the result is, how much smaller and how good it is, and what comes next."""

import math
import shlex
import textwrap
from collections.abc import Collection

from oneshot.errors import printable
from oneshot.report.card import PAGE_NAME, has_own_types, quantised_as
from oneshot.report.records import Check, Report
from oneshot.report.terminal import WIDTH
from oneshot.report.words import NOTHING, OPENED, amount, by_kind, duration, gibibytes, size, verdict

NAME_WIDTH = 14
OTHER_DTYPE = 0.1  # two files differ in the bytes of a parameter by more only if their dtypes do


def summary(
    report: Report,
    *,
    weights: tuple[int | None, int | None],
    check: Check | None,
    source: str,
    gguf: str | None = None,
    told: Collection[str] = (),
) -> str:
    """Return the summary of a run in lines of at most 80 columns.

    Args:
        weights: bytes of the weight files before and after, None if they are not known.
        check: None without one. source: the checkpoint as it was given. gguf: the result's GGUF file, which llama.cpp
            measures; None if the result has none. told: warnings that the user has read on this terminal.
    """
    stored, output = report.stored_parameters, str(report.config["output"])
    removed = 1 - stored["compressed"] / stored["dense"]
    lines = [("result", output)]
    lines.append(("parameters", f"{amount(stored['dense'])} → {amount(stored['compressed'])} (−{removed:.1%})"))
    if "original" in stored:
        gone = 1 - stored["compressed"] / stored["original"]
        lines.append(("", f"−{gone:.1%} of the {amount(stored['original'])} that the input was made from"))
    form = str(report.config["form"])
    lines.append(("form", f"{form}, opened by {OPENED[form]}"))
    before, after = weights
    if before is not None and after is not None:
        dtype = str(report.config["save_dtype"])
        stored_as = "" if dtype == "keep" else f", stored as {dtype}"  # a quantised input may be the smaller file
        own_types = has_own_types(report)
        stored_as = ", every matrix in a type of its own" if own_types else stored_as
        rounded = quantised_as(report)
        stored_as = stored_as if rounded is None else f", {rounded}"
        lines.append(("weight files", f"{size(before)} → {size(after)}{stored_as}"))
        alike = after * stored["dense"] / stored["compressed"]  # of the original in the result's dtype
        if abs(alike / before - 1) > OTHER_DTYPE and not own_types and rounded is None:
            lines.append(("same dtype", f"{size(alike)} → {size(after)}, had the original been stored like the result"))
    lines.append(("time", f"{duration(report.seconds['total'])}, peak memory {gibibytes(report.peak_bytes)}"))
    lines += check_lines(check)
    allowed = report.config["target"].get("max_loss")
    if allowed is not None and check is not None and check.lost_nats is not None:
        rise = math.expm1(check.lost_nats)
        lines.append(("loss", f"perplexity {rise:+.1%} over the kinds of text, {100 * allowed:.3g}% was allowed"))
    warnings = set(report.all_warnings)
    lines += [("warning", warning) for warning in sorted(warnings.difference(told))]
    again = len(warnings.intersection(told))
    lines += [("warning", f"{again} while it ran (also in {output}/{PAGE_NAME})")] * bool(again)
    both = f"{shlex.quote(output)} --baseline {shlex.quote(source)}"
    lines.append(("next", f"oneshot evaluate {both} --text YOUR_TEXT"))
    if gguf is not None:
        lines[-1] = "next", f"llama-perplexity -m {shlex.quote(gguf)} -f YOUR_TEXT"
    elif report.dense_shape["causal"] and not report.dense_shape["num_decoder_layers"]:
        lines.append(("", f"oneshot chat {both}"))
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
        lines.append(("", f"{verdict(compressed / dense)}"))
    if check.kinds:
        lines.append(("by kind", by_kind(check.ratios)))
    if check.answers:
        lines.append(("asked", check.question))
        lines += [(name, check.answers[key] or NOTHING) for name, key in (("before", "dense"), ("after", "compressed"))]
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
