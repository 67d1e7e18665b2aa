"""`oneshot compress | profile | imatrix | init | evaluate | completion`: one command with subcommands."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from oneshot.cli.process import interruptible, lasting_streams, told
from oneshot.parsing import did_you_mean
from oneshot.version import __version__

COMMANDS = {
    "compress": "make a checkpoint smaller",
    "profile": "measure what smaller sizes cost, for compress --profile",
    "imatrix": "write llama.cpp's importance matrix, for llama-quantize",
    "init": "write a recipe file with comments, for compress --config",
    "evaluate": "measure quality, sizes and latency beside a baseline",
    "chat": "ask a model, and its original beside it",
    "completion": "print what makes a shell complete commands and options",
}


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the subcommand that the first argument names, and return its exit code.

    `prog`: how the usage names the subcommand; None for `oneshot NAME`.
    """
    with lasting_streams(), interruptible():
        try:
            return _run(list(sys.argv[1:] if argv is None else argv), prog)
        except SystemExit as ended:  # argparse's, after its help or an error
            raise SystemExit(ended.code or told(written=False)) from None


def _run(arguments: list[str], prog: str | None) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: oneshot COMMAND [options]\n\n" + "\n".join(f"  {name:12}{text}" for name, text in COMMANDS.items())
        )
        print("\noneshot COMMAND --help lists the options of a command.")
        return told(written=False) if arguments else 2
    if arguments[0] == "--version":
        print(f"oneshot {__version__}")
        return told(written=False)
    name, *rest = arguments
    if name not in COMMANDS:
        similar = did_you_mean(name, COMMANDS)
        print(f"error: {name} is not a command; give one of {', '.join(COMMANDS)}{similar}", file=sys.stderr)
        return 2
    # torch's C++ code warns once that the choice of cuSOLVER (machine/device.py) is experimental; read at its import
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # huge pages for tensors where Linux gives them to whoever asks: a lower peak, and a fraction of the page faults
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    code: int = import_module(f"oneshot.cli.{name}").main(rest, prog or f"oneshot {name}")
    return code
