"""`oneshot compress | profile | evaluate`: one command with three subcommands."""

import signal
import sys
from collections.abc import Sequence

COMMANDS = {
    "compress": "make a checkpoint smaller",
    "profile": "measure what smaller sizes cost, for compress --profile",
    "evaluate": "measure quality, sizes and latency beside a baseline",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first argument names, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: oneshot COMMAND [options]\n\n" + "\n".join(f"  {name:10}{text}" for name, text in COMMANDS.items())
        )
        print("\noneshot COMMAND --help lists the options of a command.")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"oneshot {version('oneshot')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: {name} is not a command; give one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    return run(name, rest, prog=f"oneshot {name}")


def run(name: str, argv: Sequence[str] | None, prog: str) -> int:
    """Run one subcommand; SIGTERM cleans up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if name == "compress":
        from oneshot.cli.compress import main as command
    elif name == "profile":
        from oneshot.cli.profile import main as command
    else:
        from oneshot.cli.evaluate import main as command
    return command(argv, prog)
