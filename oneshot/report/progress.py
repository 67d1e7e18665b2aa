"""Progress of a run: its stages, bars, warnings, and the seconds of its stages."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from oneshot.linalg import psd
from oneshot.linalg.psd import GramNote
from oneshot.report.display import Display
from oneshot.report.records import LayerReport
from oneshot.report.stages import Stages
from oneshot.report.words import amount, gibibytes, left

READING = "reading"  # the first stage of every run
ERROR_EXPLAINED = (
    '"error" beside the layers is how far the output of their attention or FFN is from the original\'s, as a share '
    "of it (0.144 is 14.4 %)."
)


@dataclass(frozen=True)
class Progress:
    """The progress of a run, as a function is told.

    Attributes:
        stage: what the run does now.
        done: tokens that passed a layer, counted for every layer, or bytes or steps.
        total: of them all; None if it is not known.
        number: the number of the stage, from 1; None as long as it is not known.
        count: the number of all stages; None as `number`.
        seconds_left: about what the whole run still takes; None as long as too little was measured.
    """

    stage: str
    done: float
    total: float | None = None
    number: int | None = None
    count: int | None = None
    seconds_left: float | None = None


Shown = bool | Callable[[Progress], None]  # whether progress is on stderr, or who is told instead


class Tracker:
    """Follow a run through its stages, and show or tell where it is. A context manager.

    Args:
        shown: whether progress is on stderr, or the function that is told instead.
        ending: names of stages that come after the run, with the caller.
    """

    def __init__(
        self, shown: Shown = False, *, ending: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._shows = shown if callable(shown) else None, shown is True
        self._display: Display | None = None
        self._clock = clock
        self.stages, self.ending = Stages(clock), tuple(ending)
        self.stages.enter(READING)
        self._said = set[str]()
        self._step, self._detail, self._note = "", "", ""
        self._share: float | None = None
        self._since = clock()  # of the step

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the line from a terminal, before something else is printed; the next stage shows it again."""
        if self._display is not None:
            self._display.close()
            self._display = None

    def expect(self, stages: Sequence[tuple[str, float]]) -> None:
        """State the stages of the run in order, and the predicted seconds of each, of which only ratios count."""
        self.stages.expect([*stages, *((name, 0.0) for name in self.ending)])

    def enter(self, stage: str) -> None:
        """Go on to a stage of the run."""
        if self.stages.enter(stage):
            self._begin("", stage)

    def step(self, what: str, *, brief: bool = False) -> None:
        """Say what the present stage does now, whose length is not known; `brief`: no line of a file is worth it."""
        self._begin(what, what, brief=brief)

    def say(self, sentence: str) -> None:
        """Show a sentence that stays, once; a function is not told of it."""
        if self._shows and sentence not in self._said:
            self._said.add(sentence)
            self._shown().say(sentence)

    def advanced(self, name: str, done: float, total: float | None, *, detail: str, note: str) -> None:
        """Show how far the present stage is, or tell a function. `name`: of the stage, for a function."""
        self._share, self._step = done / total if total else None, ""
        self._detail, self._note = detail, note
        self._told(name, done, total)
        if self._shows:
            self._shown().update()

    def describe(self) -> tuple[str, float | None]:
        """Return the line that is shown now, and the share of the stage that is done."""
        stages, parts = self.stages, [self._detail] if self._detail else []
        name = self._step or stages.name
        name += "" if stages.number is None else f" ({stages.number} of {stages.count})"
        if self._step:
            seconds = self._clock() - self._since
            parts = [f"{seconds:.0f} s so far"] if seconds >= 1 else []
        remaining = stages.left(self._share)
        parts += [] if remaining is None else [left(remaining)]
        parts += [self._note] if self._note else []
        return "  |  ".join([name, *parts]), self._share

    def _begin(self, step: str, told: str, *, brief: bool = False) -> None:
        self._step, self._share, self._detail, self._note, self._since = step, None, "", "", self._clock()
        self._told(told, 0)
        if self._shows:
            self._shown().begin("" if brief else f"{self.describe()[0]} …")

    def _told(self, name: str, done: float, total: float | None = None) -> None:
        if self._tell is not None:
            number, count = self.stages.number, self.stages.count
            self._tell(Progress(name, done, total, number, count, self.stages.left(self._share)))

    def _shown(self) -> Display:
        if self._display is None:
            self._display = Display(self.describe, self._clock)
        return self._display


@contextmanager
def following(shown: Shown | Tracker) -> Iterator[Tracker]:
    """Yield a tracker: the caller's, which stays open, or one of our own."""
    if isinstance(shown, Tracker):
        yield shown
        return
    with Tracker(shown) as tracker:
        yield tracker


class ProgressBar:
    """Count how much of a text passed the layers of a stage, or other units.

    Args:
        tracker: who shows it. num_layers: layers that all of the text passes. total: tokens of the text, bytes or other
            units; 0 if that is not known.
        stage: the stage that begins; None: the present one goes on.
        unit: of what is shown: `layers`, or of the total.
    """

    def __init__(
        self, tracker: Tracker, *, total: float, num_layers: int = 1, stage: str | None = None, unit: str = "tokens"
    ) -> None:
        self._tracker, self._num_layers, self._total, self._unit = tracker, num_layers, total, unit
        self._passed, self._note = 0.0, ""
        if stage is not None:
            tracker.enter(stage)

    def advance(self, passed: float) -> None:
        """Count tokens that passed a part of a layer, or other units."""
        most = self._num_layers * self._total or math.inf
        self._passed = min(self._passed + passed, most)  # parts of a layer are fractions, which round
        self._show()

    def layer_done(self, layer: LayerReport) -> None:
        """Show the layer's worst error and the memory."""
        known = [sublayer.predicted_error or sublayer.measured_error for sublayer in layer.sublayers]
        errors = [error for error in known if error is not None]
        shown = [f"error {max(errors):.3f}"] if errors else []
        self._note = ", ".join([*shown, f"peak {gibibytes(layer.peak_bytes)}"])
        self._show()

    def _show(self) -> None:
        name, whole = self._tracker.stages.name, self._num_layers * self._total
        of_text = self._passed / self._num_layers
        if self._unit == "layers":
            layers = self._passed / self._total if self._total else 0.0
            rounding = 1e-6  # of sums of fractions
            name = f"layer {max(1, math.ceil(layers - rounding))}/{self._num_layers}"
            detail = f"{int(layers + rounding)}/{self._num_layers}"
        elif self._total:
            detail = f"{amount(of_text)}/{amount(self._total)} {self._unit}"
        else:
            detail = f"{amount(of_text)} {self._unit}"
        self._tracker.advanced(name, self._passed, whole or None, detail=detail, note=self._note)


@contextmanager
def unheard() -> Iterator[None]:
    """Keep all that this thread logs meanwhile from whoever listens: it is about to be said again."""
    thread = threading.get_ident()

    def is_of_another(record: logging.LogRecord) -> bool:
        return record.thread != thread

    listening = [*logging.getLogger().handlers, *logging.getLogger("oneshot").handlers, logging.lastResort]
    handlers = [handler for handler in listening if handler is not None]
    for handler in handlers:
        handler.addFilter(is_of_another)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_of_another)


class WarningLog(logging.Handler):
    """Collect this package's warnings of the present thread for the report. A context manager.

    What is heard inside `shared` is of all results of a run, and stays. Several runs may go on in threads; each hears
    of its own. Notes on Grams are collected apart, and nobody else hears of them: a run tells of each kind once
    (`report.grams`).
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []
        self._notes: list[GramNote] = []
        self._shared: dict[str, None] = {}
        self._shared_notes: list[GramNote] = []
        self._is_shared = False
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a warning."""
        if record.thread == self._thread:
            message = record.getMessage()
            if self._is_shared:
                self._shared[message] = None
            else:
                self._messages.append(message)

    def take(self) -> tuple[str, ...]:
        """Return the messages since the last call."""
        taken, self._messages = tuple(self._messages), []
        return taken

    def take_notes(self) -> tuple[GramNote, ...]:
        """Return the notes on Grams since the last call."""
        taken, self._notes = tuple(self._notes), []
        return taken

    def _keep_note(self, record: logging.LogRecord) -> bool:
        """Keep a note on a Gram, and return whether the record is anything else."""
        found = getattr(record, "gram_note", None)
        if record.thread != self._thread or not isinstance(found, GramNote):
            return True
        (self._shared_notes if self._is_shared else self._notes).append(found)
        return False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Keep what is heard meanwhile for every result of the run."""
        before, self._is_shared = self._is_shared, True
        try:
            yield
        finally:
            self._is_shared = before

    @property
    def of_all(self) -> tuple[str, ...]:
        """Return the messages that are of all results."""
        return tuple(self._shared)

    @property
    def notes_of_all(self) -> tuple[GramNote, ...]:
        """Return the notes on Grams that are of all results."""
        return tuple(self._shared_notes)

    def __enter__(self) -> "WarningLog":
        logging.getLogger("oneshot").addHandler(self)
        psd.logger.addFilter(self._keep_note)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("oneshot").removeHandler(self)
        psd.logger.removeFilter(self._keep_note)


class Stopwatch:
    """Measure the seconds of named stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def total(self) -> dict[str, float]:
        """Return all stages and their `total`."""
        return self.seconds | {"total": time.perf_counter() - self._start}
