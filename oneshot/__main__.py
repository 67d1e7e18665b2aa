"""`python -m oneshot`: the same as `oneshot`."""

import sys

from oneshot.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
