"""`python -m oneshot.compress`: the same as `oneshot compress`."""

import sys
from types import ModuleType

from oneshot.cli.compress import main
from oneshot.config import Config
from oneshot.pipeline import compress
from oneshot.report.records import Report

__all__ = ["main"]


class _CallableModule(ModuleType):
    """An import binds this module over the function `oneshot.compress` of the package; so the module can be called."""

    def __call__(self, config: Config, *, show_progress: bool = False) -> Report:
        return compress(config, show_progress=show_progress)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    from oneshot.cli.main import run

    sys.exit(run("compress", None, prog="python -m oneshot.compress"))
