"""`oneshot chat OUT`: questions to a model, and to its original beside it."""

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from oneshot.cli.options import CHECKPOINT_HELP, add_device, begin_work, run_command
from oneshot.cli.parser import Parser
from oneshot.errors import ConfigError, printable


def build_parser(prog: str = "oneshot chat") -> argparse.ArgumentParser:
    """Return the parser of all options."""
    parser = Parser(prog, "CHECKPOINT [--prompt TEXT] [options]", "Talk to a model, and to its original beside it.")
    parser.add_argument("checkpoint", help=CHECKPOINT_HELP)
    parser.add_argument("--revision", help="branch, tag or commit of a hub name")
    parser.add_argument("--baseline", help="a model that is asked the same, usually the dense one")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="ask this and exit; may be repeated, as turns of one conversation (default: what you type, line by line)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, help="longest answer, in tokens (default: %(default)s)"
    )
    add_device(parser, "auto")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "oneshot chat") -> int:
    """Run and return the exit code, as `options.run_command`."""
    arguments = build_parser(prog).parse_args(argv)

    def run() -> None:
        if arguments.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {arguments.max_new_tokens} is too small; give at least 1.")
        begin_work(arguments)
        _talk(arguments)

    return run_command(arguments, run)


def _talk(arguments: argparse.Namespace) -> None:
    """Let the models answer every prompt, each in a conversation of its own."""
    from oneshot.evaluation import Conversation
    from oneshot.export import open_folder
    from oneshot.machine import resolve_device, resolve_dtype
    from oneshot.machine.scratch import scratch_folder

    device = resolve_device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device)
    asked = [(arguments.checkpoint, arguments.revision)]
    if arguments.baseline:
        asked.append((arguments.baseline, None))
    with scratch_folder() as scratch:
        folders = [open_folder(name, scratch, revision) for name, revision in asked]
        conversations = [Conversation(folder, device=device, dtype=dtype) for folder in folders]
        for prompt in arguments.prompt or _typed():
            for (name, _), conversation in zip(asked, conversations, strict=True):
                if len(asked) > 1:
                    print(f"[{printable(Path(name).name)}]")
                for piece in conversation.answer(prompt, arguments.max_new_tokens):
                    print(piece, end="", flush=True)
                print()


def _typed() -> Iterator[str]:
    """Yield the lines that a user types, until the end of the input or an empty line."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is not UTF-8 may be piped
    if sys.stdin.isatty():
        print("Ask the model; an empty line ends.")
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
