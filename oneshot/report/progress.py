"""Progress of a run: bars, warnings, and the seconds of its stages."""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tqdm import tqdm

from oneshot.linalg import psd
from oneshot.linalg.psd import GramNote
from oneshot.report.records import LayerReport


@dataclass(frozen=True)
class Progress:
    """The progress of a stage of a run. `done` and `total` are tokens or bytes; `total` is None if it is not known."""

    stage: str
    done: float
    total: float | None = None


Shown = bool | Callable[[Progress], None]  # whether bars are on stderr, or who is told instead


def announce(stage: str, shown: Shown) -> None:
    """Say that a stage begins whose length is not known."""
    if callable(shown):
        shown(Progress(stage, 0))
    elif shown:
        print(f"{stage} …", file=sys.stderr, flush=True)


class ProgressBar:
    """Show layer, error, tokens per second, time left and peak memory on stderr, or tell a function. A context manager.

    Args:
        num_layers, num_tokens: their product is the total; 0 tokens if it is not known.
        description: description of the stage; None counts layers.
    """

    def __init__(
        self, *, num_layers: int, num_tokens: int, visible: Shown, description: str | None = None, unit: str = "tok"
    ) -> None:
        self._num_layers, self._tell = num_layers, visible if callable(visible) else None
        self._stage, self._done, self._total = description or f"layer 1/{num_layers}", 0.0, num_layers * num_tokens
        self._bar = tqdm(
            total=self._total or None,
            unit=unit,
            unit_scale=True,
            disable=visible is not True,
            desc=self._stage,
            smoothing=0.1,
        )

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, amount: float) -> None:
        """Count tokens that passed a part of a layer, or bytes."""
        self._done = min(self._done + amount, self._total or math.inf)  # parts of a layer are fractions, which round
        self._bar.update(self._done - self._bar.n)
        if self._tell is not None:
            self._tell(Progress(self._stage, self._done, self._total or None))

    def layer_done(self, layer: LayerReport) -> None:
        """Show the layer's worst error and the number of the next layer."""
        known = [sublayer.predicted_error or sublayer.measured_error for sublayer in layer.sublayers]
        errors = [error for error in known if error is not None]
        shown = f"{max(errors):.3f}" if errors else "–"
        self._stage = f"layer {min(layer.layer + 2, self._num_layers)}/{self._num_layers}"
        self._bar.set_description(self._stage)
        self._bar.set_postfix_str(f"error {shown}, peak {layer.peak_bytes / 2**30:.2f} GiB")


class WarningLog(logging.Handler):
    """Collect this package's warnings of the present thread for the report. A context manager.

    Several runs may go on in threads; each hears of its own. Notes on Grams are collected apart, and nobody else hears
    of them: a run tells of each kind once (`report.grams`).
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []
        self._notes: list[GramNote] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a warning."""
        if record.thread == self._thread:
            self._messages.append(record.getMessage())

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
        self._notes.append(found)
        return False

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
