"""What a run shows and tells of its progress: stages, counts, and the seconds that are left."""

import io
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig

from oneshot.footprint.seconds import stage_seconds
from oneshot.pipeline import compress, compress_sizes
from oneshot.report.display import LINE_SECONDS, Display
from oneshot.report.progress import ERROR_EXPLAINED, Progress, ProgressBar, Tracker
from oneshot.report.stages import Stages


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# What is left


def test_what_is_left_scales_the_prediction_by_what_was_measured() -> None:
    """The machine takes twice the predicted seconds."""
    clock = Clock()
    stages = Stages(clock)
    stages.enter("reading")
    stages.expect([("reading", 0.0), ("curvature", 10.0), ("layers", 50.0), ("check", 5.0)])
    clock.now += 100  # which says nothing of how fast the machine computes
    assert stages.left(None) is None
    stages.enter("curvature")
    clock.now += 10
    assert (stages.number, stages.count) == (2, 4)
    assert stages.left(0.5) == pytest.approx(10 + 2 * 55)
    clock.now += 10
    stages.enter("layers")
    assert stages.left(None) == pytest.approx(2 * 55)
    clock.now += 25
    assert stages.left(0.25) == pytest.approx(75 + 2 * 5)
    clock.now += 75
    stages.enter("check")
    assert stages.left(None) == pytest.approx(10)
    clock.now += 100
    assert stages.left(None) == 0, "never negative"


def test_a_stage_of_another_speed_is_judged_more_and_more_by_itself() -> None:
    clock = Clock()
    stages = Stages(clock)
    stages.expect([("curvature", 10.0), ("layers", 100.0)])
    stages.enter("curvature")
    clock.now += 10
    stages.enter("layers")
    told = []
    for done in range(1, 5):  # three times as slow as the first
        clock.now += 60
        told.append(stages.left(done / 5))
    truth = [240, 180, 120, 60]
    misses = [abs(one - true) / true for one, true in zip(told, truth, strict=True) if one is not None]
    assert len(misses) == 4
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] < 0.05


def test_nothing_is_said_before_anything_is_measured_and_skipped_stages_do_not_count() -> None:
    clock = Clock()
    stages = Stages(clock)
    assert (stages.number, stages.count, stages.left(0.5)) == (None, None, None)
    stages.expect([("profile", 100.0), ("layers", 10.0), ("writing", 0.0)])
    stages.enter("layers")  # a resumed run has its profile
    assert stages.number == 2
    assert stages.left(0.0) is None
    clock.now += 1
    assert stages.left(0.5) is None
    clock.now += 4
    assert stages.left(0.5) == pytest.approx(5)
    stages.enter("writing")
    clock.now += 3
    assert stages.left(0.25) == pytest.approx(9), "not predicted, so it is judged by itself"
    stages.enter("of no plan")
    assert (stages.number, stages.left(0.5)) == (None, None)


def test_stages_of_several_sizes_follow_each_other() -> None:
    stages = Stages(Clock())
    stages.expect([("profile", 1.0), ("layers", 1.0), ("writing", 0.0), ("layers", 1.0), ("writing", 0.0)])
    numbers = []
    for name in ("profile", "layers", "writing", "layers", "writing"):
        stages.enter(name)
        numbers.append(stages.number)
    assert numbers == [1, 2, 3, 4, 5]


# What is shown


def shown(clock: Clock, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, work: Callable[[Tracker], None]) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    with Tracker(True, clock=clock) as tracker:
        tracker.expect([("reading", 0.0), ("layers", 60.0), ("writing", 0.0)])
        work(tracker)
    return stream.getvalue()


def layers(clock: Clock) -> Callable[[Tracker], None]:
    def work(tracker: Tracker) -> None:
        tracker.step("opening a model")
        tracker.say(ERROR_EXPLAINED)
        tracker.say(ERROR_EXPLAINED)
        bar = ProgressBar(tracker, num_layers=30, total=1000, stage="layers", unit="layers")
        for _ in range(300):
            clock.now += 1.0
            bar.advance(100)

    return work


def test_a_file_gets_few_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    text = shown(clock, io.StringIO(), monkeypatch, layers(clock))
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "opening a model (1 of 3) …"
    assert lines[1] == ERROR_EXPLAINED
    assert lines[2] == "layers (2 of 3) …"
    assert len(lines) <= 3 + 300 / LINE_SECONDS
    assert "layers (2 of 3)  |  12/30  |  about 3 min left" in lines
    assert lines.count(ERROR_EXPLAINED) == 1


def test_a_terminal_has_one_line_that_counts_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    text = shown(clock, Terminal(), monkeypatch, layers(clock))
    drawn = [part.strip() for part in re.split(r"[\r\n]", text) if part.strip()]
    assert any(re.match(r"layers \(2 of 3\)  \|  12/30  \|  about 3 min left  \|.*\|  4\d %", line) for line in drawn)
    assert "tok" not in text


def test_a_warning_stands_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live line is taken away before a handler further up prints the warning."""
    stream = Terminal()

    def work(tracker: Tracker) -> None:
        tracker.step("planning")
        logging.getLogger("oneshot.planning").warning("told")
        stream.write("HERE")

    text = shown(Clock(), stream, monkeypatch, work)
    before = text[: text.index("HERE")]
    assert before.endswith("\r")
    assert not before.split("\r")[-2].strip(), "blanks over the line"


@pytest.mark.parametrize(("stream", "seconds"), [(Terminal, 1), (io.StringIO, LINE_SECONDS)], ids=["terminal", "file"])
def test_nothing_is_silent_for_long(stream: type[io.StringIO], seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that tells nothing is shown again, with the seconds that it took so far."""
    told, clock = stream(), Clock()
    again = threading.Event()
    monkeypatch.setattr("oneshot.report.display.SILENT_SECONDS", 0.01)
    update = Display.update

    def updated(self: Display) -> None:
        update(self)
        again.set()

    monkeypatch.setattr(Display, "update", updated)

    def work(tracker: Tracker) -> None:
        tracker.step("planning")
        clock.now += seconds
        again.clear()
        again.wait(5)
        again.clear()
        again.wait(5)

    assert f"planning (1 of 3)  |  {seconds:.0f} s so far" in shown(clock, told, monkeypatch, work)
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


# What is told


def test_counts_end_at_the_total() -> None:
    """Counts are sums of fractions, which round."""
    told: list[Progress] = []
    bar = ProgressBar(Tracker(told.append), num_layers=3, total=10, stage="layers", unit="layers")
    for _ in range(3):
        bar.advance(10 + 1e-9)
    counted = told[1:]
    assert [progress.done for progress in counted] == pytest.approx([10, 20, 30])
    assert counted[-1].done == counted[-1].total == 30
    assert [progress.stage for progress in counted] == ["layer 1/3", "layer 2/3", "layer 3/3"]


def test_without_a_total_everything_is_counted() -> None:
    told: list[Progress] = []
    bar = ProgressBar(Tracker(told.append), total=0, stage="writing", unit="bytes")
    for _ in range(2):
        bar.advance(7)
    assert told == [Progress("writing", 0), Progress("writing", 7), Progress("writing", 14)]


def test_a_run_tells_of_every_stage_that_it_predicted(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, each with its number, and with the tokens of the text."""
    predicted: dict[str, float] = {}

    def kept(*arguments: Any) -> dict[str, float]:
        predicted.update(stage_seconds(*arguments))
        return stage_seconds(*arguments)

    monkeypatch.setattr("oneshot.run.prediction.stage_seconds", kept)
    told: list[Progress] = []
    config = make_config(make_checkpoint(layers=2, tied=True), form="per-layer", num_sequences=4)
    compress(config, show_progress=told.append)
    numbers = [progress.number for progress in told if progress.number is not None]
    assert numbers == sorted(numbers)
    assert list(dict.fromkeys(numbers)) == list(range(1, len(predicted) + 1))
    assert {progress.count for progress in told} == {None, len(predicted)}
    assert list(predicted) == [
        *(
            "reading",
            "curvature",
            "profile",
            "ranks of the embedding",
            "planning the sizes of the layers",
            "layers",
            "writing",
        )
    ]
    assert max(p.done for p in told if p.stage == "layer 2/2") == 2 * config.text.num_tokens
    embedding = [p for p in told if p.stage == "ranks of the embedding"]
    assert embedding[-1].done == embedding[-1].total == 2 + 4


def test_stages_that_several_sizes_share_are_counted_once(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    told: list[Progress] = []
    config = make_config(make_checkpoint(layers=2), num_sequences=2)
    compress_sizes(config, [0.1, 0.2], show_progress=told.append)
    numbers = [progress.number for progress in told if progress.number is not None]
    assert list(dict.fromkeys(numbers)) == [1, 2, 3, 4, 5], "reading, and twice layers and writing"
    assert numbers == sorted(numbers)


# Warnings


def test_what_several_sizes_share_warns_in_the_report_of_each(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """The text is read once, for the first; a text of few tokens is few for all."""
    config = make_config(make_checkpoint(layers=2), num_sequences=2)
    first, second = compress_sizes(config, [0.1, 0.2])
    [sentence] = [warning for warning in first.warnings if "calibration tokens are few" in warning]
    assert "64 calibration tokens are few" in sentence
    assert "at least 256 tokens, such as --num-sequences 8 of 32 tokens each" in sentence
    assert sentence in second.warnings
