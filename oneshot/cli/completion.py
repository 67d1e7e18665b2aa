"""`oneshot completion SHELL`: print what makes a shell complete commands, options and words."""

import argparse
from collections.abc import Sequence
from importlib import import_module

from oneshot.cli.options import run_command
from oneshot.cli.parser import OneOf, Parser
from oneshot.errors import ConfigError

SHELLS = ("bash", "zsh", "tcsh")
COMPLETED = ("compress", "profile", "imatrix", "init", "evaluate", "chat")  # this command is typed once
FILES = ("checkpoint", "config", "file", "calibration", "text", "baseline")
FOLDERS = ("output", "profile", "offload_dir", "include_path")


def build_parser(prog: str = "oneshot completion") -> Parser:
    """Return the parser of all options."""
    parser = Parser(prog, "SHELL", "Print what makes a shell complete commands, options and words.")
    parser.add_argument("shell", type=OneOf(SHELLS), help=", ".join(SHELLS))
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def script(shell: str) -> str:
    """Return the completion of one shell for all commands. Raises `ConfigError` without shtab."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("Completion needs shtab: pip install 'oneshot-llm[completion]'.") from error
    root = argparse.ArgumentParser("oneshot")
    commands = root.add_subparsers()
    for name in COMPLETED:
        own = import_module(f"oneshot.cli.{name}").build_parser()
        command = commands.add_parser(name, parents=[own], add_help=False, help=own.description)
        for action in command._actions:  # argparse has no public list of what a parser takes
            if isinstance(action.type, OneOf):
                action.choices = action.type.words
            elif action.dest in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.dest in FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return str(shtab.complete(root, shell=shell))


def main(argv: Sequence[str] | None = None, prog: str = "oneshot completion") -> int:
    """Run and return the exit code, as `options.run_command`."""
    arguments = build_parser(prog).parse_args(argv)
    return run_command(arguments, lambda: print(script(arguments.shell)), writes=False)
