"""`oneshot evaluate OUT --baseline CHECKPOINT --text FILE`: quality, sizes and latency, side by side."""

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from oneshot.cli.options import CHECKPOINT_HELP, add_device, begin_work, run_command
from oneshot.cli.parser import OneOf, Parser
from oneshot.config import EvaluationOptions, Kind
from oneshot.errors import OutputError, cause, printable
from oneshot.fields import field_names
from oneshot.tasks import ALL_BUILTIN, builtin_tasks, refuse_unknown


def build_parser(prog: str = "oneshot evaluate") -> argparse.ArgumentParser:
    """Return the parser of all options."""
    usual = EvaluationOptions()
    parser = Parser(
        prog,
        "CHECKPOINT --baseline DENSE [options]",
        "Measure quality, sizes and latency of a checkpoint, beside a baseline.",
    )
    parser.add_argument("checkpoint", help=CHECKPOINT_HELP)
    parser.add_argument("--revision", help="branch, tag or commit of a hub name")
    parser.add_argument("--baseline", help="the checkpoint to compare it with, usually the dense one")
    parser.add_argument(
        "--baseline-revision", metavar="REVISION", help="branch, tag or commit of the baseline's hub name"
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        help="text for perplexity, as for --calibration; for other kinds examples: a .jsonl or .parquet file, or "
        "org/name:config:split; may be repeated",
    )
    parser.add_argument(
        "--kind",
        type=OneOf(get_args(Kind)),
        metavar="KIND",
        help=f"what the model is asked: {', '.join(get_args(Kind))} (default: what the class in config.json is for)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="windows, examples or requests of tasks in one forward pass (default: 1, and 8 examples)",
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        default=usual.sequence_length,
        help="tokens in a window or of an example (default: %(default)s)",
    )
    parser.add_argument(
        "--max-windows",
        type=int,
        help="at most this many windows or examples of each text (default: all; c4 has hundreds of millions)",
    )
    parser.add_argument(
        "--tasks",
        action="extend",
        nargs="+",
        default=[],
        help=f"lm-eval tasks; {', '.join(builtin_tasks())}, or {ALL_BUILTIN} for these, need no network",
    )
    parser.add_argument("--limit", type=int, help="at most this many documents of each task")
    parser.add_argument(
        "--include-path", help="folder with task YAML files of your own; they replace lm-eval's of the same name"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=int,
        help="tokens of the timed prefill (default: 512, or as many as learned positions allow)",
    )
    parser.add_argument(
        "--decode-tokens",
        type=int,
        default=usual.decode_tokens,
        help="tokens of the timed decoding; 0 leaves latency out (default: %(default)s)",
    )
    add_device(parser, "auto")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="also write the numbers and their origin to this JSON file; an earlier one is replaced",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _refuse_file(path: Path) -> None:
    """Raise `OutputError` if the numbers cannot be written to a file; nothing stays there."""
    try:
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path} cannot be written: its folder does not exist; create it first.")
        if path.is_dir():
            raise OutputError(f"{path} is a folder; name the JSON file to write.")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file, and would be replaced by one; name the JSON file to write.")
        if path.exists() and not _is_replaceable(path):
            raise OutputError(f"{path} exists already and is not an earlier output of evaluate; name another file.")
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.absolute().parent):
            pass
    except (OSError, ValueError) as error:  # also a zero byte
        raise OutputError(f"{path} cannot be written ({cause(error)}); name another file.") from error


def _is_replaceable(path: Path) -> bool:
    """Return whether a file is empty, or begins as what `write_json` writes."""
    with path.open("rb") as file:
        start = file.read(100)
    return not start or re.match(rb'\{\s*"date": "', start) is not None


def main(argv: Sequence[str] | None = None, prog: str = "oneshot evaluate") -> int:
    """Run and return the exit code, as `options.run_command`."""
    arguments = build_parser(prog).parse_args(argv)

    def run() -> None:
        options = {name: getattr(arguments, name) for name in field_names(EvaluationOptions)}
        EvaluationOptions.of(**options)  # wrong values are told of before large libraries are loaded
        if arguments.output:
            _refuse_file(Path(arguments.output))
        if arguments.tasks:
            refuse_unknown(arguments.tasks, arguments.include_path)
        begin_work(arguments)
        from oneshot.evaluation import evaluate, kept_comparison, print_evaluations, write_json
        from oneshot.report.additions import add_evaluation, stored_identity
        from oneshot.report.card import PAGE_NAME

        folder = Path(arguments.checkpoint).expanduser()
        measured = stored_identity(folder)
        evaluations = evaluate(
            [arguments.checkpoint],
            arguments.text,
            baseline=arguments.baseline,
            revision=arguments.revision,
            baseline_revision=arguments.baseline_revision,
            **options,
        )
        print_evaluations(evaluations)
        if arguments.output:
            write_json(Path(arguments.output), evaluations, vars(arguments))
        if add_evaluation(folder, kept_comparison(evaluations, vars(arguments)), measured):
            print(f"Added to the report of the result:\n{printable(str(folder / PAGE_NAME))}")

    return run_command(arguments, run, writes=bool(arguments.output))
