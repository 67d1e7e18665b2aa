"""CONTRIBUTING's English, where a pattern finds it: rule 3's phrases, and sentences far above rule 2's words."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("oneshot", "kernels", "vllm-plugin", "tests", "benchmarks", "examples", "docs", ".")
FROZEN = re.compile(r"CHANGELOG\.md|records/")
MOST_WORDS = 35  # rule 2 asks for 25; this is where a sentence must become two
PHRASES = re.compile(r"\b(?:that|those) of\b|\bthe (?:former|latter)\b", re.IGNORECASE)
# docstrings, other strings (no group), blocks of comments, and comments behind code
PYTHON = re.compile(r'^ *r?"""((?:.|\n)*?)"""|"""(?:.|\n)*?"""|((?:^ *# .*\n)+)|  # (.*)', re.MULTILINE)
NOT_PROSE = re.compile(r"^```.*?^```|^(?:[|<#]| {4})[^\n]*$", re.MULTILINE | re.DOTALL)  # code, tables, headings
CODE = re.compile(r"`[^`]*`|\$[^$]*\$")
LINK = re.compile(r"\]\([^)]*\)")
NAMES = re.compile(r"((?:\S+ ){0,2}\S+, ){4,}")  # an enumeration, which is read at a glance
END = re.compile(r"(?<=[.!?…])[\"”)*_]*\s+|(?<=[;:])\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.) |\n\s*(?=[\w, `*]+: )")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of every docstring, comment or paragraph."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = NOT_PROSE.sub(lambda found: "\n" * found[0].count("\n"), source)
        found = re.finditer(r"(?:\S.*\n?)+", text)
    else:
        text, found = source, (part for part in PYTHON.finditer(source) if part.lastindex)
    for part in found:
        yield text.count("\n", 0, part.start()) + 1, re.sub(r"^ *# ", "", part[part.lastindex or 0], flags=re.MULTILINE)


def faults(text: str) -> Iterator[str]:
    """Yield the phrases and the sentences of a text that the rules forbid."""
    plain = LINK.sub("]", CODE.sub("X", text))
    for sentence in END.split(plain):
        flat = " ".join(sentence.split())
        yield from (phrase[0] for phrase in PHRASES.finditer(flat))
        if len(re.findall(r"\S*\w\S*", NAMES.sub("X, ", flat))) > MOST_WORDS:
            yield flat


@pytest.mark.parametrize("place", PLACES)
def test_no_sentence_breaks_the_rules(place: str) -> None:
    find = ROOT.glob if place == "." else (ROOT / place).rglob
    files = [path for path in chain(find("*.md"), find("*.py")) if not FROZEN.search(str(path))]
    assert [f"{path}:{line}: {fault}" for path in files for line, text in prose(path) for fault in faults(text)] == []
