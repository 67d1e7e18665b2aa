"""The text in the package: its size, its kinds, and that no row repeats another."""

import ast
import json
from collections import Counter

import pytest

from oneshot.text import BUILTIN, iter_documents
from oneshot.text.sources import BUILTIN_FILE

ROWS = [json.loads(line) for line in BUILTIN_FILE.read_text(encoding="utf-8").splitlines()]
KINDS = {"encyclopedia", "story", "how-to", "dialogue", "code", "mathematics", "web", "technical"}
LONG_RUN = 12  # words in a row that two texts share only if one is copied


def test_every_kind_has_an_equal_share() -> None:
    assert all(row.keys() - {"language"} == {"kind", "text"} for row in ROWS)
    count = Counter(row["kind"] for row in ROWS)
    letters = Counter({kind: sum(len(row["text"]) for row in ROWS if row["kind"] == kind) for kind in count})
    assert count.keys() == KINDS
    for share in (count, letters):
        assert max(share.values()) <= 1.5 * min(share.values())
    assert all(700 <= len(row["text"]) <= 2700 for row in ROWS)


def test_the_size_is_that_of_half_a_run() -> None:
    assert 200_000 <= BUILTIN_FILE.stat().st_size <= 400_000


def test_no_two_rows_share_a_long_run_of_words() -> None:
    seen = dict[tuple[str, ...], int]()
    for number, row in enumerate(ROWS):
        words = row["text"].split()
        for start in range(len(words) - LONG_RUN + 1):
            run = tuple(words[start : start + LONG_RUN])
            assert seen.setdefault(run, number) == number, run


@pytest.mark.filterwarnings("error")
def test_code_in_python_is_python() -> None:
    code = [row["text"] for row in ROWS if row["kind"] == "code" and row["language"] == "python"]
    assert len(code) >= sum(row["kind"] == "code" for row in ROWS) / 2
    for text in code:
        ast.parse(text)


def test_the_documents_are_the_rows() -> None:
    assert list(iter_documents(BUILTIN, seed=None)) == [row["text"] for row in ROWS]
    shuffled = list(iter_documents(BUILTIN, seed=0))
    assert sorted(shuffled) == sorted(row["text"] for row in ROWS)
    assert shuffled != [row["text"] for row in ROWS]


def test_the_kinds_take_turns_so_that_few_documents_have_all() -> None:
    kind_of = {row["text"]: row["kind"] for row in ROWS}
    orders = [list(iter_documents(BUILTIN, seed=seed)) for seed in range(3)]
    assert all(isinstance(text, str) for order in orders for text in order)
    kinds = [[kind_of[str(text)] for text in order] for order in orders]
    fewest = min(Counter(kind_of.values()).values())
    for order in kinds:
        assert order[:2] == ["story", "code"]
        for start in range(0, fewest * len(KINDS), len(KINDS)):
            assert set(order[start : start + len(KINDS)]) == KINDS
    assert len({order[0] for order in orders}) > 1, "the documents are in a seeded order"
