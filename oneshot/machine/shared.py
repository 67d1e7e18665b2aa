"""Settings of the whole process that several runs in threads may need at once."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


def shared_by_threads(change: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Let a change of the process's settings last while any thread needs it.

    The first thread inside makes the change, and the last one restores what was before. With a change for each thread,
    one that ends first would take the setting from the others, and one that ends last would restore it for good.
    """
    lock, held, inside = threading.Lock(), ExitStack(), 0

    @functools.wraps(change)
    @contextmanager
    def shared() -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                held.enter_context(change())
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    held.close()

    return shared
