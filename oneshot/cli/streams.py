"""Standard output and standard error that may be closed, full, or a pipe whose reader has gone."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


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
