"""`python -m oneshot.evaluate`: the same as `oneshot evaluate`."""

import sys

from oneshot.cli.main import main

sys.exit(main(["evaluate", *sys.argv[1:]], prog="python -m oneshot.evaluate"))
