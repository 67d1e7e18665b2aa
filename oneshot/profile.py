"""`python -m oneshot.profile CHECKPOINT --output PROFILE`: what every size of every block costs, for `--profile`."""

import argparse
import signal
import sys
from collections.abc import Sequence

from oneshot.options import add_checkpoint, add_resources, add_shared_method, add_text, parse_config, run_command
from oneshot.pipeline import profile
from oneshot.report import print_profile
from oneshot.workers import launched_rank


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
    """Run; returns the exit code, as `options.run_command`."""
    arguments = build_parser().parse_args(argv)

    def run() -> None:
        found = profile(parse_config(arguments, sparsity=0.0), show_progress=not arguments.quiet)
        if not arguments.quiet and launched_rank() == 0:
            print_profile(found)

    return run_command(arguments, run)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up like Ctrl-C
    sys.exit(main())
