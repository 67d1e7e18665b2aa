"""The modules of the benchmarks folder, which is no package."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """`benchmark_module(name)` -> a module of the benchmarks folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def harness(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("harness")
