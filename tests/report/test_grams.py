"""What a run says of Grams that rounding left singular."""

import json
import logging
from dataclasses import asdict, replace

import pytest

from oneshot.linalg import psd
from oneshot.linalg.psd import GramNote
from oneshot.report.grams import gram_sentences, worst
from oneshot.report.progress import WarningLog
from oneshot.report.records import LayerReport

RAISED = GramNote("kept columns", "raised", 1e-3)
SINGULAR = GramNote("kept columns", "singular", 3e9)
INPUTS = GramNote("inputs of up_proj", "raised", 10.0)


def layer(number: int, *notes: GramNote) -> LayerReport:
    return LayerReport(number, (), 0.0, 0, 0, (), notes)


def test_there_is_one_sentence_for_each_kind_and_it_names_the_layers() -> None:
    layers = [layer(0, RAISED, INPUTS), layer(1), layer(2, replace(RAISED, size=1e-1)), layer(3, SINGULAR)]
    inputs, kept, singular = gram_sentences([INPUTS, INPUTS], layers)
    assert kept.startswith("The text says too little about some directions of the kept columns (layers 0, 2 of 4): ")
    assert "nothing has to be done" in kept
    assert "measure the result" in singular
    assert all("(--num-sequences)" in sentence for sentence in (inputs, kept, singular))
    assert "raised to 1e-01 of the mean diagonal" in kept
    assert "inputs of up_proj (layer 0 of 4, 2 times while sizes were measured)" in inputs
    assert "layer 3 of 4" in singular
    assert "condition number is 3e+09" in singular
    assert gram_sentences([], [layer(0)]) == []


def test_many_layers_are_counted() -> None:
    [sentence] = gram_sentences([], [layer(number, RAISED) for number in range(40)])
    assert "(40 layers of 40)" in sentence


def test_a_layer_has_the_worst_note_of_each_kind_also_after_json() -> None:
    notes = worst([RAISED, SINGULAR, replace(RAISED, size=1.0), replace(RAISED, size=1e-2)])
    assert notes == (replace(RAISED, size=1.0), SINGULAR)
    report = layer(5, *notes)
    assert LayerReport.from_dict(json.loads(json.dumps(asdict(report)))) == report


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_a_run_collects_notes_whatever_is_shown(level: int, caplog: pytest.LogCaptureFixture) -> None:
    """Processes that are not the first show errors only."""
    with caplog.at_level(level):
        with WarningLog() as log:
            psd.note(RAISED)
            assert log.take_notes() == (RAISED,)
            assert log.take_notes() == log.take() == ()
        assert caplog.records == []
        psd.note(RAISED)
        assert len(caplog.records) == (level == logging.WARNING)
