"""`python -m oneshot.profile`: the same as `oneshot profile`."""

import sys
from types import ModuleType

from oneshot.cli.profile import main
from oneshot.config import Config
from oneshot.pipeline import profile
from oneshot.planning import Profile

__all__ = ["main"]


class _CallableModule(ModuleType):
    """An import binds this module over the function `oneshot.profile` of the package; so the module can be called."""

    def __call__(self, config: Config, *, show_progress: bool = False) -> Profile:
        return profile(config, show_progress=show_progress)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    from oneshot.cli.main import run

    sys.exit(run("profile", None, prog="python -m oneshot.profile"))
