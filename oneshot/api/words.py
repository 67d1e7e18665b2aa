"""Messages in the words of Python's users: arguments in place of flags, and no names of temporary files."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args, get_type_hints

from oneshot.api.texts import TEXT_FILE, TOKEN_FILE
from oneshot.config import PARTS
from oneshot.errors import OneshotError

SWITCHES = ("overwrite", "resume", "tie")  # flags without a value
MORE_WORDS = {"device": ("cpu", "cuda"), "calibration": ("self", "builtin")}
SETTING = re.compile(r"--set ([a-z_]+)=((?:[\w.-]*\w)?)")
FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)((?: +(?:-?\d[\w.]*\w|-?\d|[a-z][\w:-]*\w))?)")


@contextmanager
def python_words(scratch: Path | None = None) -> Iterator[None]:
    """Let errors of ours speak of arguments (`sparsity=0.2`) and not of flags (`--sparsity 0.2`).

    `scratch`: the folder of objects in memory, whose files are not named.
    """
    try:
        yield
    except OneshotError as error:
        error.args = (in_words_of_python(str(error), scratch),)
        raise


def in_words_of_python(text: str, scratch: Path | None) -> str:
    """Return a message with arguments in place of flags."""
    if scratch is not None:
        place = re.escape(str(scratch))
        text = re.sub(rf"{place}/\S*?({TEXT_FILE}|{TOKEN_FILE})", "The given text", text)
        text = re.sub(r"(?<!^)(?<!\. )The given text", "the given text", text)
        text = re.sub(rf"{place}/[^\s;,:)]*[^\s;,:).]", "the given model", text)
    text = SETTING.sub(lambda found: _argument(found[1], found[2]), text)
    return FLAG.sub(_flag, text)


def _flag(found: re.Match[str]) -> str:
    name, value = found[1].replace("-", "_"), found[2].strip()
    if name in SWITCHES:
        return f"{name}=True{found[2]}"
    is_value = value[-1:].isdigit() or value[:1].isdigit() or value in (*_words(name), *MORE_WORDS.get(name, ()))
    if value and (is_value or found.string[found.end() :].startswith(" is not ")):
        return _argument(name, value)
    return name + found[2]


def _argument(name: str, value: str) -> str:
    is_number = re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value) is not None
    return f"{name}={value if is_number or not value else repr(value)}"


def _words(option: str) -> tuple[str, ...]:
    """Return the words that an option takes."""
    for record in PARTS.values():
        hint = get_type_hints(record).get(option)
        if hint is not None:
            return tuple(word for part in (hint, *get_args(hint)) for word in get_args(part) if isinstance(word, str))
    return ()
