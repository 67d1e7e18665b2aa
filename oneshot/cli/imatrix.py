"""`oneshot imatrix CHECKPOINT --output FILE`: llama.cpp's importance matrix, for `llama-quantize --imatrix FILE`."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from oneshot.cli.options import (
    add_checkpoint,
    add_machine,
    add_text,
    begin_work,
    parse_config,
    refuse_recipe,
    run_command,
)
from oneshot.cli.parser import Parser
from oneshot.config import own_name
from oneshot.parsing import launched_rank


def build_parser(prog: str = "oneshot imatrix") -> argparse.ArgumentParser:
    """Return the parser of all options; `Config` has their defaults."""
    parser = Parser(
        prog,
        "CHECKPOINT [-o FILE] [options]",
        "Write llama.cpp's importance matrix of a model: how large the inputs of its linears are on a text.",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="file to write (default: NAME-imatrix.gguf in the working folder)"
    )
    add_text(parser)
    add_machine(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    parser.set_defaults(set=[])
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "oneshot imatrix") -> int:
    """Run and return the exit code, as `options.run_command`."""
    arguments = build_parser(prog).parse_args(argv)

    def run() -> None:
        config = parse_config(arguments, sparsity=0.0)
        begin_work(arguments)
        from oneshot.pipeline import imatrix

        if arguments.output is None:
            config = replace(config, output=f"{own_name(config.checkpoint)}-imatrix.gguf")
        refuse_recipe(arguments.config, [config.output])
        path = imatrix(config, show_progress=not arguments.quiet)
        if not arguments.quiet and launched_rank() == 0:
            print(f"importance    {path}: llama-quantize --imatrix {path} MODEL.gguf OUT.gguf TYPE")

    return run_command(arguments, run)
