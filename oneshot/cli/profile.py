"""`oneshot profile CHECKPOINT --output PROFILE`: what every size of every sublayer costs, for `--profile`."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from oneshot.cli.options import (
    add_checkpoint,
    add_form,
    add_machine,
    add_settings,
    add_text,
    begin_work,
    parse_config,
    run_command,
)
from oneshot.cli.parser import Parser
from oneshot.config import own_name
from oneshot.parsing import launched_rank


def build_parser(prog: str = "oneshot profile") -> argparse.ArgumentParser:
    """Return the parser of all options; `Config` has their defaults."""
    parser = Parser(
        prog,
        "CHECKPOINT [-o PROFILE] [options]",
        "Measure once what every size of every sublayer costs; compress --profile plans from it.",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "-o", "--output", metavar="PROFILE", help="folder to write (default: NAME-profile in the working folder)"
    )
    add_form(parser)
    add_settings(parser)
    add_text(parser)
    add_machine(parser)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "oneshot profile") -> int:
    """Run and return the exit code, as `options.run_command`."""
    arguments = build_parser(prog).parse_args(argv)

    def run() -> None:
        config = parse_config(arguments, sparsity=0.0)
        begin_work(arguments)
        from oneshot.checkpoint import output_folder
        from oneshot.pipeline import profile
        from oneshot.profiling import RANKING, VERDICT
        from oneshot.report.terminal import print_mixture, print_profile

        if arguments.output is None:
            config = replace(config, output=f"{own_name(config.checkpoint)}-profile")
        measured = profile(config, show_progress=not arguments.quiet)
        if not arguments.quiet and launched_rank() == 0:
            print_profile(measured)
            verdict = output_folder(config.output) / VERDICT
            if verdict.is_file():
                print_mixture(json.loads(verdict.read_bytes()))
                print(f"The order of the experts in every layer is in {verdict.with_name(RANKING)}.")

    return run_command(arguments, run)
