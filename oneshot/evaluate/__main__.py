"""`python -m oneshot.evaluate`: the same as `oneshot evaluate`."""

import sys

from oneshot.cli.main import run

sys.exit(run("evaluate", None, prog="python -m oneshot.evaluate"))
