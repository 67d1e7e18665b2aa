"""What a run shows on stderr: one live line on a terminal, and a few lines in a file."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

SILENT_SECONDS = 1.0  # after which the line on a terminal is drawn again, with the seconds so far
LINE_SECONDS = 30.0  # between lines in a file


def progress_bar(batches: Sequence[Any], name: str, *, unit: str = "batch", visible: bool = True) -> Iterator[Any]:
    """Yield batches or other units, with a bar on a terminal; a file gets a line once in `LINE_SECONDS` at most."""
    if sys.stderr.isatty():
        yield from tqdm(batches, desc=name, unit=unit, leave=False, disable=not visible)
        return
    last = time.monotonic()
    for number, batch in enumerate(batches):
        if visible and time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            tell_file(f"{name}: {unit} {number + 1} of {len(batches)}")
        yield batch


def tell_file(line: str) -> None:
    """Print a line on stderr if that is no terminal, where something else shows the progress."""
    if not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


class LineClearing(logging.Handler):
    """Take the live line from a terminal before a handler further up prints a warning behind it."""

    def __init__(self, clear: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._take_away = clear

    def emit(self, record: logging.LogRecord) -> None:
        """Take the line away."""
        self._take_away()


class Display:
    """Show the latest of what a run does, without ever being silent for long. It has a thread while it is open.

    On a terminal there is one line that changes. Elsewhere, as in a log file, there are whole lines: one for every call
    of `begin`, and else one in `LINE_SECONDS` at most.

    Args:
        describe: returns the line that is true now, and the share that is done if it is known.
    """

    def __init__(
        self, describe: Callable[[], tuple[str, float | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._describe, self._clock = describe, clock
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._stream = sys.stderr
        self._before_warnings = LineClearing(self._clear)
        self._bar: tqdm | None = None
        if self._stream.isatty():
            logging.getLogger("oneshot").addHandler(self._before_warnings)
            self._bar = tqdm(total=1.0, leave=False, bar_format="{desc}", file=self._stream, dynamic_ncols=True)
        self._last = clock()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._thread.start()

    def begin(self, line: str) -> None:
        """Show that something begins; an empty line is none in a file."""
        with self._lock:
            if self._bar is not None:
                self._draw()
            elif line:
                self._print(line)

    def say(self, sentence: str) -> None:
        """Show a sentence that stays."""
        with self._lock:
            if self._bar is None:
                self._print(sentence)
            else:
                tqdm.write(sentence, file=self._stream)

    def update(self) -> None:
        """Show what is true now, unless something was shown a moment ago."""
        waits = LINE_SECONDS if self._bar is None else 0.1
        if self._clock() - self._last < waits:
            return
        with self._lock:
            if self._bar is None:
                self._print(self._describe()[0])
            else:
                self._draw()

    def close(self) -> None:
        """End the thread, and take the line from a terminal."""
        self._ended.set()
        self._thread.join()
        logging.getLogger("oneshot").removeHandler(self._before_warnings)
        if self._bar is not None:
            self._bar.close()

    def _repeat(self) -> None:
        while not self._ended.wait(SILENT_SECONDS):
            self.update()

    def _clear(self) -> None:
        """Take the line away, so that a warning does not stand behind it."""
        if self._bar is not None:
            self._bar.clear()

    def _print(self, line: str) -> None:
        self._last = self._clock()
        print(line, file=self._stream, flush=True)

    def _draw(self) -> None:
        assert self._bar is not None
        self._last = self._clock()
        line, share = self._describe()
        self._bar.bar_format = "{desc}" if share is None else "{desc}  |{bar:12}| {percentage:3.0f} %"
        self._bar.n = share or 0.0
        self._bar.set_description_str(line, refresh=False)
        self._bar.refresh()
