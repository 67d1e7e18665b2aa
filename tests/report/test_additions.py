"""Evaluations are added to a result's report, page and card: several, whole or not at all, and without paths."""

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_page import Page, make_report

from oneshot.evaluation import Evaluation, kept_comparison
from oneshot.evaluation.comparison import TextRecord
from oneshot.json_text import json_text
from oneshot.machine import durable
from oneshot.report.additions import LAST, add_check, add_evaluation, stored_identity
from oneshot.report.card import CARD_NAME, PAGE_NAME, REPORT_NAME
from oneshot.report.page import report_page
from oneshot.report.records import Check, Report
from oneshot.report.side_by_side import Comparison

NAMES = (REPORT_NAME, PAGE_NAME, CARD_NAME)
HOSTILE = "a|b <script>"
DENSE = Evaluation("/models/dense", 1000, 800, 4000, 2000, 64, {}, {})


def evaluation(text: str = "/a/text.txt", ratio: float = 1.5) -> Comparison:
    """Return what is kept of a result with this score beside its original."""
    texts = {text: TextRecord(2, 510, "c5a8")}
    dense = replace(DENSE, perplexity={text: 8.0}, tokens_scored={text: 510}, texts=texts)
    small = replace(dense, checkpoint="/out", stored_parameters=800, perplexity={text: 8.0 * ratio}, score=ratio)
    return kept_comparison([small, dense], {"sequence_length": 256, "decode_tokens": 0, "text": [text], "limit": None})


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """Return a folder with a report, its page and a card."""
    report = make_report()
    (tmp_path / REPORT_NAME).write_text(json_text(report.to_dict()))
    (tmp_path / PAGE_NAME).write_text(report_page(report))
    (tmp_path / CARD_NAME).write_text("# A card\n")
    return tmp_path


def stored(folder: Path) -> Report:
    return Report.from_dict(json.loads((folder / REPORT_NAME).read_text()))


def test_every_evaluation_is_kept_and_a_repeated_one_is_replaced(result: Path) -> None:
    first, other, again = evaluation(), evaluation("/b/other.txt"), evaluation(ratio=1.02)
    assert all(add_evaluation(result, one) for one in (first, other, again))
    assert stored(result).evaluations == (other, again)
    text = (result / PAGE_NAME).read_text()
    assert text == report_page(stored(result))
    page = Page(text)
    assert ["perplexity text.txt (510 tokens)", "8.16", "8.00", "1.020"] in [
        row for table in page.tables for row in table
    ]
    assert "out: perplexity × 1.02 on this text: as good as the original on this text." in page.texts["p"]
    assert "Options: sequence_length 256, decode_tokens 0." in page.texts["p"]
    card = (result / CARD_NAME).read_text()
    assert card.count("## Evaluations") == card.count(LAST) == 1
    assert card.startswith("# A card\n")
    assert re.search(r"\nMeasured \d{4}-\d\d-\d\d \d\d:\d\d UTC:\n", card)
    for line in ("|  | out | dense | ratio |", "| perplexity other.txt (510 tokens) | 12.00 | 8.00 | 1.500 |"):
        assert card.count(line) >= 1
    assert "1.500" not in card.split("text.txt")[-1]


def test_a_check_keeps_evaluations(result: Path) -> None:
    add_evaluation(result, evaluation())
    check = Check("text.jsonl", 2048, {"dense": 20.0, "compressed": 21.5})
    report = add_check(result, make_report(), check)
    assert report.check == check
    assert [one.repeats(evaluation()) for one in report.evaluations] == [True]
    assert stored(result) == report


def test_nothing_is_added_to_the_result_of_another_run(result: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With --overwrite a run may replace a result while it is checked or evaluated."""
    measured, check = stored_identity(result), Check("text.jsonl", 2048, {"dense": 20.0, "compressed": 21.5})
    add_check(result, make_report(), check)
    assert stored_identity(result) == measured, "what is added makes no other result"
    other = make_report()
    other = replace(other, seconds={stage: spent + 1 for stage, spent in other.seconds.items()})
    (result / REPORT_NAME).write_text(json_text(other.to_dict()))
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    assert not add_evaluation(result, evaluation(), measured)
    assert "Another run replaced" in caplog.text
    found = add_check(result, make_report(), check).check
    assert found is not None
    assert found.perplexity is None
    assert "another run replaced" in found.skipped
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before
    assert add_evaluation(result, evaluation(), stored_identity(result))


def test_two_texts_of_one_name_are_two_rows() -> None:
    texts = {"/a/test.txt": 8.0, "/b/test.txt": 4.0}
    records = {text: TextRecord(1, 255, "c5a8") for text in texts}
    kept = kept_comparison(
        [replace(DENSE, perplexity=texts, tokens_scored=dict.fromkeys(texts, 255), texts=records)], {}
    )
    assert kept.rows["perplexity test.txt (255 tokens)"] == ((8.0, None),)
    assert kept.rows["perplexity test.txt (2) (255 tokens)"] == ((4.0, None),)
    assert set(kept.texts) == {"test.txt", "test.txt (2)"}


def test_names_are_text_on_the_page_and_in_the_card(result: Path) -> None:
    assert add_evaluation(result, evaluation(f"/a/{HOSTILE}"))
    assert f"perplexity {HOSTILE} (510 tokens)" in [
        row[0] for table in Page(report_page(stored(result))).tables for row in table
    ]
    assert r"a\|b \<script\>" in (result / CARD_NAME).read_text()


@pytest.mark.parametrize("place", ["nowhere", "folder", "link"])
def test_a_folder_without_a_report_of_its_own_stays(place: str, result: Path, tmp_path: Path) -> None:
    folder = tmp_path / place
    if place != "nowhere":
        folder.mkdir()
    if place == "link":  # as in the hub's cache
        (folder / REPORT_NAME).symlink_to(result / REPORT_NAME)
    before = (result / REPORT_NAME).read_text()
    assert not add_evaluation(folder, evaluation())
    assert (result / REPORT_NAME).read_text() == before


def damage(result: Path, _: pytest.MonkeyPatch) -> None:
    (result / REPORT_NAME).write_text('{"layers": 3}')


def refuse(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "flush", fails)


@pytest.mark.parametrize("trouble", [damage, refuse])
def test_nothing_is_lost_where_it_cannot_be_added(
    trouble: Callable[[Path, pytest.MonkeyPatch], None],
    result: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trouble(result, monkeypatch)
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    assert not add_evaluation(result, evaluation())
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before
    (told,) = (record.getMessage() for record in caplog.records)
    assert "not added" in told
    assert "--output" in told
    assert str(result) in told
