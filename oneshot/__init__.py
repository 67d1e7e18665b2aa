"""Training-free, one-shot structured compression of LLM checkpoints."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oneshot.config import Config, MachineOptions, Target, TextOptions
from oneshot.errors import OneshotError
from oneshot.recipes import RECIPES, Method
from oneshot.version import __version__

if TYPE_CHECKING:
    from oneshot.pipeline import compress, compress_sizes, predict, profile
    from oneshot.planning import Plan, Profile
    from oneshot.report.records import Footprint, Report

__all__ = [
    "RECIPES",
    "Config",
    "Footprint",
    "MachineOptions",
    "Method",
    "OneshotError",
    "Plan",
    "Profile",
    "Report",
    "Target",
    "TextOptions",
    "__version__",
    "compress",
    "compress_sizes",
    "predict",
    "profile",
]

# Public names whose modules import torch; they are imported when they are first used.
_LATER = {
    "Footprint": "oneshot.report.records",
    "Plan": "oneshot.planning",
    "Profile": "oneshot.planning",
    "Report": "oneshot.report.records",
    "compress": "oneshot.pipeline",
    "compress_sizes": "oneshot.pipeline",
    "predict": "oneshot.pipeline",
    "profile": "oneshot.pipeline",
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
