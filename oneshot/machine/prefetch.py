"""Loading the next item while the present one is in use."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def prefetch(load: Callable[[int], Item], count: int) -> Iterator[Item]:
    """Yield `load(0) … load(count − 1)`; a thread loads the next item while the caller works on the last."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as executor:
        pending = executor.submit(load, 0)
        for index in range(count):
            loaded = pending.result()
            if index + 1 < count:
                pending = executor.submit(load, index + 1)
            yield loaded
            del loaded  # free before the next item is waited for
