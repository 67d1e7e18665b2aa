"""What the page of the Python interface shows: one entry for every argument and attribute."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import oneshot


def documented() -> Iterator[tuple[str, Any, list[str]]]:
    """Yield public functions, classes and methods that list arguments or attributes, and the names of those."""
    for name in oneshot.__all__:
        public = getattr(oneshot, name)
        members = inspect.getmembers(public, inspect.isfunction) if inspect.isclass(public) else []
        for path, item in [(name, public), *((f"{name}.{key}", member) for key, member in members if key[0] != "_")]:
            if "\nArgs:\n" in (text := inspect.getdoc(item) or ""):
                yield path, text, [key for key in inspect.signature(item).parameters if key != "self"]
            elif "\nAttributes:\n" in text:
                yield path, text, [field.name for field in dataclasses.fields(item)]


@pytest.mark.parametrize(("text", "names"), [pytest.param(*rest, id=path) for path, *rest in documented()])
def test_every_argument_has_a_line_of_its_own(text: str, names: list[str]) -> None:
    """Two in one line are one entry on the page, under the first one's name."""
    assert [name for name in names if not re.search(rf"^    {name}: ", text, re.MULTILINE)] == []
