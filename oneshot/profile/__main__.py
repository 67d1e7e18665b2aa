"""`python -m oneshot.profile`: the same as `oneshot profile`."""

import sys

from oneshot.cli.main import run

sys.exit(run("profile", None, prog="python -m oneshot.profile"))
