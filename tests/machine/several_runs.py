"""Run several command lines of `oneshot compress` in one group of processes, because a launch takes longer than a run.

torchrun … python tests/machine/several_runs.py '[["checkpoint", "--output=out", …], …]'
"""

import json
import sys

from oneshot.cli.compress import main

if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        if main(arguments) != 0:
            sys.exit(f"failed: {' '.join(arguments)}")
