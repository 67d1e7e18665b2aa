"""`python -m oneshot.compress`: the same as `oneshot compress`."""

import sys

from oneshot.cli.main import main

sys.exit(main(["compress", *sys.argv[1:]], prog="python -m oneshot.compress"))
