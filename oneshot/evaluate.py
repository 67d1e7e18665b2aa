"""`python -m oneshot.evaluate`: the same as `oneshot evaluate`."""

import sys

from oneshot.cli.evaluate import main

__all__ = ["main"]

if __name__ == "__main__":
    from oneshot.cli.main import run

    sys.exit(run("evaluate", None, prog="python -m oneshot.evaluate"))
