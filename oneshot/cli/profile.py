"""`oneshot profile CHECKPOINT --output PROFILE`: what every size of every sublayer costs, for `--profile`."""

import argparse
from collections.abc import Sequence

from oneshot.cli.options import add_checkpoint, add_machine, add_settings, add_text, parse_config, run_command


def build_parser(prog: str = "oneshot profile") -> argparse.ArgumentParser:
    """Return the parser of all options; their defaults are those of `Config`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure once what every size of every sublayer costs; compress --profile plans from it.",
    )
    add_checkpoint(parser)
    parser.add_argument("--output", required=True, help="folder to write; must not exist")
    add_settings(parser)
    add_text(parser)
    add_machine(parser)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "oneshot profile") -> int:
    """Run and return the exit code, as `options.run_command`."""
    arguments = build_parser(prog).parse_args(argv)

    def run() -> None:
        from oneshot.machine import launched_rank  # torch: not for --help
        from oneshot.pipeline import profile
        from oneshot.report.terminal import print_profile

        measured = profile(parse_config(arguments, sparsity=0.0), show_progress=not arguments.quiet)
        if not arguments.quiet and launched_rank() == 0:
            print_profile(measured)

    return run_command(arguments, run)
