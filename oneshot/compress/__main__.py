"""`python -m oneshot.compress`: the same as `oneshot compress`."""

import sys

from oneshot.cli.main import run

sys.exit(run("compress", None, prog="python -m oneshot.compress"))
