"""The modules of the benchmarks folder, which is no package."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from rows import Rows, ShowRows


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """`benchmark_module(name)` -> a module of the benchmarks folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def harness(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("harness")


@pytest.fixture
def judging(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("judging")


@pytest.fixture
def show_rows(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShowRows]:
    """`show_rows(rows, other_tools=rows)`: modules that are imported from then on see these rows in place of files."""

    def show(quality: Rows, **others: Rows) -> None:
        forget_readers()
        monkeypatch.setattr(harness, "read_rows", lambda name: ({"quality": quality} | others)[name])

    yield show
    forget_readers()


def forget_readers() -> None:
    """Forget the modules that took `read_rows` by name when they were imported."""
    for name in list(sys.modules):
        if name in ("quality_rows", "plot") or name.split(".")[0] == "tables":
            del sys.modules[name]
