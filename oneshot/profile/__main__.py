"""`python -m oneshot.profile`: the same as `oneshot profile`."""

import sys

from oneshot.cli.main import main

sys.exit(main(["profile", *sys.argv[1:]], prog="python -m oneshot.profile"))
