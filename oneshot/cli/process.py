"""The process of a command: standard streams that may be closed, full, or a pipe whose reader has gone, and signals.

After a signal that ends it, the command cleans up and says so in one line; it can be resumed.
"""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

ENDING = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
TOGETHER_SECONDS = 2.0  # a terminal and a launcher both send one
INTERRUPTED = 130


class Stream:
    """A text stream whose writes never fail: after the first error everything goes to the null device.

    Attributes:
        error: the first error; None without one.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write if possible, and return the number of letters; those that the encoding lacks are question marks."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        self.error = self.error or error
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self._stream.fileno())  # Python flushes what is left once more at its end


def told(*, written: bool) -> int:
    """Return the exit code of a good end, as far as standard output took what was printed.

    A command that has `written` a result ends well without it. Any other has nothing else to give, so it ends with 1. A
    sentence says so, unless the reader has gone or nobody wanted to read.
    """
    sys.stdout.flush()
    error = sys.stdout.error if isinstance(sys.stdout, Stream) else None
    if error is None:
        return 0
    if not isinstance(error, BrokenPipeError) and not (written and error.errno == errno.EBADF):
        kind, rest = ("warning", "; the result is written.") if written else ("error", ".")
        print(f"{kind}: Standard output cannot be written ({error.strerror}){rest}", file=sys.stderr)
    return 0 if written else 1


@contextmanager
def lasting_streams() -> Iterator[Stream]:
    """Let the standard streams be a `Stream` each, and yield the one of the output; at the end they are as before.

    Only for a command that has the process for itself. The number of a stream that was closed would go to the next file
    that is opened, and what libraries print into that file: it is taken by the null device.
    """
    before = sys.stdout, sys.stderr
    output, errors = (_lasting(stream, number) for stream, number in ((sys.stdout, 1), (sys.stderr, 2)))
    sys.stdout, sys.stderr = output, errors
    try:
        yield output
    finally:
        output.flush()
        errors.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO | None, number: int) -> Stream:
    if stream is not None:
        return Stream(stream)
    try:
        os.fstat(number)
    except OSError:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, number)
        if nothing > 2:  # else it took the place of a closed stream, and stays there
            os.close(nothing)
    lasting = Stream(open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
    if number == 1:
        lasting.error = OSError(errno.EBADF, "it is closed")
    return lasting


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
