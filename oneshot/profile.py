"""`python -m oneshot.profile`: the same as `oneshot profile`. The function of this name stays in the package."""

import sys

from oneshot.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]], prog="python -m oneshot.profile"))
