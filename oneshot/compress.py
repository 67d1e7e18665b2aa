"""`python -m oneshot.compress`: the same as `oneshot compress`. The function of this name stays in the package."""

import sys

from oneshot.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compress", *sys.argv[1:]], prog="python -m oneshot.compress"))
