"""A parser of command lines whose errors say what was probably meant, with one line of usage."""

import argparse
from collections.abc import Sequence
from typing import Any

from oneshot.parsing import did_you_mean, full_dtype


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that knows similar options, and leaves out what is not given.

    Args:
        prog: how the usage names the command. usage: what follows the name there.
    """

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(prog=prog, usage=f"%(prog)s {usage}", description=description)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `ArgumentParser`; an unknown option ends the program with what was probably meant."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name, is_setting, _ = unknown[0].partition("=")
            if is_setting and not name.startswith("-"):
                self.error(f"{unknown[0]} stands alone; write --set before every setting")
            self.error(f"{name} is not an option{did_you_mean(name, self._option_string_actions)}")
        return found


class OneOf:
    """A type for `add_argument` that takes these words, and short names of dtypes among them."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)

    def __call__(self, text: str) -> str:
        """Return the word. Raises `ArgumentTypeError` with what was probably meant."""
        word = full_dtype(text)
        if word not in self.words:
            shown = f"{text!r} is not one of {', '.join(self.words)}{did_you_mean(word, self.words)}"
            raise argparse.ArgumentTypeError(f"invalid choice: {shown}")
        return word
