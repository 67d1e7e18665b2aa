"""Conversations as text: columns of turns, in the words of the tokenizer's chat template."""

import ast
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oneshot.errors import CalibrationError, cause

CHATS = ("messages", "conversations")
ANSWERS = ("response", "completion")  # of a prompt
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}

Render = Callable[[Any, str], str]  # turns, and the name of their source -> text


def chat_column(names: Sequence[str]) -> str | None:
    """Return the column of turns, or the answers beside a column `prompt`; None without chats."""
    for name in CHATS:
        if name in names:
            return name
    return next((name for name in ANSWERS if name in names and "prompt" in names), None)


def turns_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the turns of a row, not checked yet; None if the row has none."""
    if column not in ANSWERS:
        return _stated(row.get(column))
    prompt, answer = _stated(row.get("prompt")), _stated(row.get(column))
    if isinstance(prompt, list) and isinstance(answer, list):  # both already are turns
        return [*prompt, *answer]
    if prompt is None or answer is None:
        return None
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _stated(value: Any) -> Any:
    """Return the turns that a cell of a CSV file states as JSON or as Python's list; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list) and found and all(isinstance(turn, dict) for turn in found):
            return found
    return value


def chat_renderer(tokenizer: Any) -> Render:
    """Return the function that makes text of turns by the tokenizer's chat template.

    Turns have `role` and `content`, or `from` and `value`. A BOS that the tokenizer itself adds is left out.

    The function raises `CalibrationError` for other turns, and without a template.
    """

    def render(turns: Any, source: str) -> str:
        if getattr(tokenizer, "chat_template", None) is None:
            raise CalibrationError(
                f"{source} holds conversations, but the model's tokenizer has no chat template; give records with text."
            )
        messages = [_message(turn, source) for turn in turns] if isinstance(turns, list) else []
        if not messages:
            raise CalibrationError(f"{source} holds {reprlib.repr(turns)} where turns of a conversation should be.")
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # templates raise what they like; the cause is named and chained
            raise CalibrationError(
                f"The tokenizer's chat template does not take a conversation of {source} ({cause(error)}); leave such "
                "records out."
            ) from error
        added = added_start(tokenizer)
        return text if added is None else text.removeprefix(tokenizer.bos_token)

    return render


def added_start(tokenizer: Any) -> int | None:
    """Return the BOS that a tokenizer puts before every text; None if it puts none."""
    start = getattr(tokenizer, "bos_token_id", None)
    if start is None:
        return None
    ids = tokenizer("a", verbose=False)["input_ids"]
    return start if len(ids) > 1 and ids[0] == start else None


def _message(turn: Any, source: str) -> dict[str, str]:
    keys = ("role", "content") if isinstance(turn, Mapping) and "role" in turn else ("from", "value")
    role, content = (turn.get(key) if isinstance(turn, Mapping) else None for key in keys)
    if not isinstance(role, str) or not isinstance(content, str):
        raise CalibrationError(
            f"{source} holds {reprlib.repr(turn)} where a turn should be; give role and content, or from and value, as "
            "text."
        )
    return {"role": ROLES.get(role, role), "content": content}
