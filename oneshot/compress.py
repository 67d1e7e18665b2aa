"""`python -m oneshot.compress`: the same as `oneshot compress`."""

import sys

from oneshot.cli.compress import main

__all__ = ["main"]

if __name__ == "__main__":
    from oneshot.cli.main import run

    sys.exit(run("compress", None, prog="python -m oneshot.compress"))
