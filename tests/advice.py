"""The options that a refusal advises, as a user would follow the sentence to the letter.

A refusal is "cause; remedy." The remedy has alternatives ("add it, or leave it out"), each of which sets options
(`--set heads=none`, `--form stock or per-layer`) or leaves out the one that the cause names first.
"""

import re
from collections.abc import Iterator, Mapping

Options = dict[str, str]
OPTION = re.compile(
    r"--set (?P<key>\w+)=(?P<value>[\w.-]*\w)?"
    r"|(?P<flag>--[a-z-]+)(?: (?P<given>-?[\w.-]*\w)(?= or |,|;|\.|\)| so | as |$))?"
    r"|(?<![\w-])(?P<bare>\w+)=(?P<word>[\w.-]*\w)?"
)
MEANT = {"a selector for ffn": "ffn=id", "least squares as correction": "correction=two-stream", "whole heads": ""}


def mentions(text: str) -> list[tuple[str, str | None]]:
    """Return the options that a text names, as flags of `Options`, with their values."""
    found = []
    for match in OPTION.finditer(text):
        key = match["key"] or match["bare"]
        found.append((f"--set {key}", match["value"] or match["word"]) if key else (match["flag"], match["given"]))
    return found


def advised(message: str, options: Mapping[str, str]) -> Iterator[Options]:
    """Yield the options of a refused run with each alternative of its advice followed; none for vague advice.

    A refusal may name several causes with a remedy each, which are followed together.
    """
    found, is_followed = [dict(options)], False
    for part in message.removeprefix("error: ").removesuffix(".").split("; moreover "):
        advice = [changed for each in found for changed in advised_of_one(part, each)]
        found, is_followed = advice or found, is_followed or bool(advice)
    yield from found if is_followed else []


def advised_of_one(message: str, options: Mapping[str, str]) -> Iterator[Options]:
    """Yield the same of one cause and its remedy, without a full stop."""
    cause, separator, remedy = message.rpartition("; ")
    if message.startswith("Give "):
        yield from one_of_two(message, options)
        return
    if not separator:
        return
    while "; " in cause and (mentions(cause.rpartition("; ")[2]) and cause.rpartition("; ")[2].startswith("set ")):
        cause, _, more = cause.rpartition("; ")
        remedy = f"{more}, and {remedy}"
    named = [flag for flag, _ in mentions(cause)]
    for clause in re.split(
        r",? or (?=(?:leave|use|set|add|give|allow|choose|ask|lower|another|--|[a-z_]+=))", remedy.rstrip(".")
    ):
        changed = followed(clause, cause, named, options)
        if changed is not None:
            yield from changed


def followed(clause: str, cause: str, named: list[str], options: Mapping[str, str]) -> list[Options] | None:
    """Return the options after one clause of a remedy, once for each value that it allows; None for vague advice."""
    changed, values = dict(options), mentions(clause)
    needed = cause
    for words, option in MEANT.items():
        needed = needed.replace(words, option)
    if re.search(r"\b(add|set) (it|them)\b", clause):
        values = [(flag, value) for flag, value in mentions(needed.partition(" needs ")[2]) if value is not None]
    to_none = re.search(r"set ([\w, ]+?) to none", clause)
    if to_none:
        values += [(f"--set {key}", "none") for key in re.findall(r"\w+", to_none[1]) if key not in ("and",)]
    if re.fullmatch(r"(use|set) none", clause.strip()):
        values = [(named[0], "none")] if named else []
    left = re.search(r"leave (it|them|both)? ?out(.*)", clause)
    if left:
        whole = named if left[1] in ("them", "both") else named[:1]
        gone = whole if left[1] else [flag for flag, _ in mentions(left[2])]
        values = [(flag, value) for flag, value in values if flag not in gone]
        for flag in gone:
            changed.pop(flag, None)
        return [changed | {flag: value for flag, value in values if value}]
    for flag in ("--budget", "--form"):
        if not values and f"another {flag.removeprefix('--')}" in clause:
            return [{name: value for name, value in options.items() if name != flag}]
    if not values or any(value is None for _, value in values):
        return None
    several = re.search(re.escape(str(values[-1][1])) + " or (?!less|more)([a-z][a-z-]+)$", clause)
    for flag, value in values:
        if flag in ("--sparsity", "--params"):
            changed = {name: one for name, one in changed.items() if name not in ("--sparsity", "--params")}
        changed[flag] = str(value)
    return [changed, changed | {values[-1][0]: several[1]}] if several else [changed]


def one_of_two(message: str, options: Mapping[str, str]) -> Iterator[Options]:
    """Yield the options without the one and without the other part of "Give either …, or …"."""
    sizes = ("intermediate_size", "hidden_rate", "inner_rate")
    stated = [f"--set {name}" for name in sizes]
    if "either a target" in message:
        yield {flag: value for flag, value in options.items() if flag not in stated}
        yield {flag: value for flag, value in options.items() if flag not in ("--sparsity", "--params")}
