"""Messages in the words of Python's users: arguments in place of flags, and no names of temporary files."""

import logging
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args, get_type_hints

from tqdm import tqdm

from oneshot.api.texts import TEXT_FILE, TOKEN_FILE
from oneshot.config import PARTS
from oneshot.errors import OneshotError
from oneshot.report.display import LineClearing
from oneshot.report.progress import WarningLog

SWITCHES = ("overwrite", "resume", "tie")  # flags without a value
MORE_WORDS = {"device": ("cpu", "cuda"), "calibration": ("self", "builtin")}
HELP = {  # of the shell, and Python's own
    "see --help and --help-methods": "see help(oneshot.compress) and oneshot.RECIPES",
    "with a key of --help-methods": "with a field of oneshot.Method",
}
COPYING = re.compile(
    r"(the given model\b.*); copy the model's (tokenizer )?files (?:there|again)", re.IGNORECASE | re.DOTALL
)
SETTING = re.compile(r"--set ([a-z_]+)=((?:[\w.-]*\w)?)")
COMMAND = re.compile(r"oneshot (compress|evaluate) ('[^']*'|[^\s-]\S*)((?: --[a-z-]+ [\w.:-]*\w)+)")
FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)((?: +(?:-?\d[\w.]*\w|-?\d|[a-z][\w:-]*\w))?)")


@contextmanager
def python_words(scratch: Path | None = None) -> Iterator[None]:
    """Let errors and warnings of ours speak of arguments (`sparsity=0.2`) and not of flags (`--sparsity 0.2`).

    `scratch`: the folder of objects in memory, whose files are not named.
    """
    listener = _Translator(scratch)
    ours = logging.getLogger("oneshot")
    ours.handlers.insert(0, listener)  # before those that show warnings or keep them for the report
    try:
        yield
    except OneshotError as error:
        error.args = (in_words_of_python(str(error), scratch),)
        raise
    finally:
        ours.removeHandler(listener)


class _Translator(logging.Handler):
    """Change warnings before other handlers get them, and show them if the caller's program has set up no logging.

    Python itself shows them only as long as nobody listens, and a run does, for its report.
    """

    def __init__(self, scratch: Path | None) -> None:
        super().__init__(logging.WARNING)
        self._scratch = scratch

    def emit(self, record: logging.LogRecord) -> None:
        """Change the text of a record."""
        record.msg, record.args = in_words_of_python(record.getMessage(), self._scratch), ()
        handlers = logging.getLogger("oneshot").handlers
        inner = [handler for handler in handlers if isinstance(handler, _Translator)]
        silent = all(isinstance(handler, _Translator | WarningLog | LineClearing) for handler in handlers)
        if silent and inner[-1] is self and not logging.getLogger().handlers:
            tqdm.write(f"{record.levelname}: {record.msg}", file=sys.stderr)


def in_words_of_python(text: str, scratch: Path | None = None) -> str:
    """Return a message with arguments in place of flags."""
    if scratch is not None:
        place = re.escape(str(scratch))
        text = re.sub(rf"{place}/\S*?({TEXT_FILE}|{TOKEN_FILE})", "The given text", text)
        text = re.sub(r"(?<!^)(?<!\. )The given text", "the given text", text)
        text = re.sub(rf"(^|\. )?{place}/[^\s;,:)]*[^\s;,:).]", _given_model, text)
        text = COPYING.sub(_tokenizer, text)  # the folder of a model in memory is not the caller's
    for shell, own in HELP.items():
        text = text.replace(shell, own)
    text = SETTING.sub(_setting, text)
    text = COMMAND.sub(_call, text).replace("--set ", "")
    return FLAG.sub(_flag, text)


def _given_model(found: re.Match[str]) -> str:
    return "the given model" if found[1] is None else f"{found[1]}The given model"


def _tokenizer(found: re.Match[str]) -> str:
    return f"{found[1]}; give {'one' if found[2] else 'another'} as the argument tokenizer"


def _setting(found: re.Match[str]) -> str:
    is_quoted = not found[2] and found.string[found.end() : found.end() + 1] in tuple("'\"[({<")
    return f"{found[1]}=" if is_quoted else _argument(found[1], found[2])


def _call(found: re.Match[str]) -> str:
    """Return a command of the shell as a call."""
    arguments = [FLAG.sub(_flag, flag).strip() for flag in re.findall(r"--\S+ \S+", found[3])]
    return f"oneshot.{found[1]}({', '.join([repr(shlex.split(found[2])[0]), *arguments])})"


def _flag(found: re.Match[str]) -> str:
    name, value = found[1].replace("-", "_"), found[2].strip()
    if name in SWITCHES:
        return f"{name}=True{found[2]}"
    is_value = value[-1:].isdigit() or value[:1].isdigit() or value in (*_words(name), *MORE_WORDS.get(name, ()))
    if value and (is_value or found.string[found.end() :].startswith(" is not ")):
        return _argument(name, value)
    return name + found[2]


def _argument(name: str, value: str) -> str:
    is_word = re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?|True|False|None", value) is None
    return f"{name}={repr(value) if is_word else value}" if value else name


def _words(option: str) -> tuple[str, ...]:
    """Return the words that an option takes."""
    for record in PARTS.values():
        hint = get_type_hints(record).get(option)
        if hint is not None:
            return tuple(word for part in (hint, *get_args(hint)) for word in get_args(part) if isinstance(word, str))
    return ()
