"""`python -m oneshot.profile CHECKPOINT --output PROFILE`: what every size of every block costs, for `--profile`."""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

from oneshot.errors import OneshotError
from oneshot.options import add_checkpoint, add_resources, add_shared_method, add_text, parse_config
from oneshot.pipeline import profile
from oneshot.report import print_profile


def build_parser() -> argparse.ArgumentParser:
    """All options; their defaults are those of `CompressionConfig`."""
    parser = argparse.ArgumentParser(
        prog="python -m oneshot.profile",
        description="Measure once what every size of every block costs; compress --profile plans from it.",
    )
    add_checkpoint(parser)
    parser.add_argument("--output", required=True, help="folder to write; must not exist")
    add_shared_method(parser)
    add_text(parser)
    add_resources(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0 done, 1 an error that the user can mend, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        found = profile(parse_config(arguments, sparsity=0.0), show_progress=not arguments.quiet)
    except OneshotError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    if not arguments.quiet:
        print_profile(found)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up like Ctrl-C
    sys.exit(main())
