"""A call into code that a checkpoint brings, such as a chat template: bounded in time, memory and length of its text.

transformers runs templates in a sandbox that keeps them from files and names, but not from taking long.
"""

import ctypes
import threading
import time
from collections.abc import Callable

import psutil

from oneshot.errors import CalibrationError

MOST_SECONDS = 10.0  # conversations take milliseconds
MOST_LETTERS = 2**26
MOST_BYTES = 2**30  # that the process may grow by meanwhile
POLL_SECONDS = 0.05


class BoundError(CalibrationError):
    """A call was given up, because it took too much."""


def bounded(call: Callable[[], str], name: str, *, most_letters: int = MOST_LETTERS) -> str:
    """Return the text that a call makes; it runs in a thread, which is stopped if it takes too much.

    Python stops a thread between two of its own steps. What holds the interpreter in one step is not stopped.

    Args:
        name: what the call is, as the subject of a sentence.

    Raises `BoundError` if it takes too much, and whatever the call raises.
    """
    made: list[str] = []
    raised: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            made.append(call())
        except BaseException as error:  # raised again below, in the thread that asked
            raised.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        _watch(ended, name)
    finally:
        if not ended.is_set():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    if raised:
        raise raised[0]
    (text,) = made
    if len(text) > most_letters:
        raise BoundError(f"{name} makes {len(text):,} letters, more than {most_letters:,}.")
    return text


def _watch(ended: threading.Event, name: str) -> None:
    """Wait for the end. Raises `BoundError` if it does not come, or if memory grows too much before."""
    started, before = time.monotonic(), 0
    while not ended.wait(POLL_SECONDS):
        held = int(psutil.Process().memory_info().rss)
        before = before or held
        if time.monotonic() - started > MOST_SECONDS:
            raise BoundError(f"{name} takes more than {MOST_SECONDS:g} seconds.")
        if held - before > MOST_BYTES:
            raise BoundError(f"{name} takes more than {MOST_BYTES >> 20} MiB of memory.")
