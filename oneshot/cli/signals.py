"""Signals that end a command: it cleans up, says so in one line, and can be resumed."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
TOGETHER_SECONDS = 2.0  # a terminal and a launcher both send one
INTERRUPTED = 130


@contextmanager
def interruptible() -> Iterator[None]:
    """Let every signal of `ENDING` raise `KeyboardInterrupt`, as Ctrl-C does; at the end they mean what they did.

    More of them do not disturb the clean-up, and one that comes later than `TOGETHER_SECONDS` ends the process at once.
    A signal that the caller ignores, as `nohup` does, stays ignored. Only the main thread can do this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: list[float] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            raise KeyboardInterrupt
        if time.monotonic() > first[0] + TOGETHER_SECONDS:
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)

    numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number in numbers if before[number] not in (signal.SIG_IGN, None)]
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    finally:
        for number in heard:
            signal.signal(number, before[number])
