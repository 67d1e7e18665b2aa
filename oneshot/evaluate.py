"""`python -m oneshot.evaluate`: the same as `oneshot evaluate`. The function of this name stays in the package."""

import sys

from oneshot.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]], prog="python -m oneshot.evaluate"))
