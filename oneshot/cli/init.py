"""`oneshot init [FILE]`: write a recipe file with comments, for `oneshot compress --config FILE`."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from oneshot.cli.options import run_command
from oneshot.cli.parser import Parser
from oneshot.errors import OutputError
from oneshot.settings import RECIPE_NAME


def build_parser(prog: str = "oneshot init") -> Parser:
    """Return the parser of all options."""
    parser = Parser(prog, "[FILE]", "Write a recipe file with comments; oneshot compress --config FILE runs it.")
    parser.add_argument("file", nargs="?", default=RECIPE_NAME, help="file to write (default: %(default)s)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def example() -> str:
    """Return the recipe file: every line that is not a comment has the default, after the checkpoint and the size."""
    return resources.files("oneshot.cli").joinpath(RECIPE_NAME).read_text(encoding="utf-8")


def main(argv: Sequence[str] | None = None, prog: str = "oneshot init") -> int:
    """Run and return the exit code, as `options.run_command`."""
    arguments = build_parser(prog).parse_args(argv)

    def run() -> None:
        path = Path(arguments.file).expanduser()
        if path.exists():
            raise OutputError(f"{path} exists already; name another file.")
        try:
            path.write_text(example(), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path} cannot be written ({error.strerror}); name another file.") from error
        print(f"{path} is written; edit it, then run: oneshot compress --config {path}")

    return run_command(arguments, run)
