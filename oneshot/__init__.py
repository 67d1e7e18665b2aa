"""Training-free, one-shot structured compression of LLM checkpoints."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oneshot.config import Config, MachineOptions, Target, TextOptions
from oneshot.errors import OneshotError
from oneshot.method import Method
from oneshot.recipes import RECIPES
from oneshot.version import __version__

if TYPE_CHECKING:
    from oneshot.api.compress import compress, predict, profile
    from oneshot.api.evaluate import evaluate
    from oneshot.api.result import Result
    from oneshot.evaluation import Evaluation
    from oneshot.planning import Plan, Profile
    from oneshot.report.progress import Progress
    from oneshot.report.records import Footprint, Report

__all__ = [
    "RECIPES",
    "Config",
    "Evaluation",
    "Footprint",
    "MachineOptions",
    "Method",
    "OneshotError",
    "Plan",
    "Profile",
    "Progress",
    "Report",
    "Result",
    "Target",
    "TextOptions",
    "__version__",
    "compress",
    "evaluate",
    "predict",
    "profile",
]

# Public names whose modules import torch; they are imported when they are first used.
_LATER = {
    "Evaluation": "oneshot.evaluation",
    "Footprint": "oneshot.report.records",
    "Plan": "oneshot.planning",
    "Profile": "oneshot.planning",
    "Progress": "oneshot.report.progress",
    "Report": "oneshot.report.records",
    "Result": "oneshot.api.result",
    "compress": "oneshot.api.compress",
    "evaluate": "oneshot.api.evaluate",
    "predict": "oneshot.api.compress",
    "profile": "oneshot.api.compress",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package: importing `oneshot.compress`, a command line, leaves the function of this name in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LATER and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
