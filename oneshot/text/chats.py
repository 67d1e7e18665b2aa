"""Conversations as text: columns of turns, in the words of the tokenizer's chat template."""

import ast
import inspect
import json
import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from oneshot.errors import CalibrationError, cause
from oneshot.text.bounded import MOST_LETTERS, BoundError, bounded

logger = logging.getLogger(__name__)

CHATS = ("messages", "conversations")
ANSWERS = ("response", "completion")  # of a prompt
ROLES = {"human": "user", "gpt": "assistant"}  # of turns with `from`
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # the column in which data sets keep a row's own arguments
LISTED = ("tools", "documents")
SAID = (*LISTED, "add_generation_prompt", "continue_final_message")  # arguments that say what the text is
TEMPLATE_NAMES = (
    *("messages", "raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner"),
)


def chat_column(names: Sequence[str]) -> str | None:
    """Return the column of turns, or the answers beside a column `prompt`; None without chats."""
    for name in CHATS:
        if name in names:
            return name
    return next((name for name in ANSWERS if name in names and "prompt" in names), None)


def turns_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the turns of a row, not checked yet; None if the row has none."""
    if column not in ANSWERS:
        return stated(row.get(column))
    prompt, answer = stated(row.get("prompt")), stated(row.get(column))
    if isinstance(prompt, list) and isinstance(answer, list):  # both already are turns
        return [*prompt, *answer]
    if prompt is None or answer is None:
        return None
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def is_turn(value: Any) -> bool:
    """Return whether a value is a turn of a conversation: with `role`, or `from` and `value`."""
    return isinstance(value, Mapping) and ("role" in value or ("from" in value and "value" in value))


def stated(value: Any) -> Any:
    """Return the turns that a cell states as JSON or as Python's list; anything else as it is."""
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


class ChatRenderer:
    """Makes text of turns by the tokenizer's chat template.

    The text is what `apply_chat_template` makes of the whole row: of turns with all that they hold (`tool_calls`,
    `reasoning_content`, content in parts), and of the columns beside them as the template's variables (`tools`,
    `documents`, `enable_thinking`, or a dictionary `chat_template_kwargs`). Turns may have `from` and `value` instead
    of `role` and `content`. A BOS that the tokenizer itself adds is left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._told = False

    def __call__(self, turns: Any, source: str, row: Mapping[str, Any] | None = None) -> str:
        """Return the text of turns in a row of a source.

        Raises `CalibrationError` for what is not a conversation, for one that the template does not take, and without a
        template; `BoundError` if the template takes too much.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise CalibrationError(
                f"{source} holds conversations, but the model's tokenizer has no chat template; give records with text."
            )
        messages = [_message(turn, source) for turn in turns] if isinstance(turns, list) else []
        if not messages:
            raise CalibrationError(f"{source} holds {reprlib.repr(turns)} where turns of a conversation should be.")
        beside = {} if row is None else dict(row)
        if "from" in turns[0] and isinstance(beside.get("system"), str) and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": beside["system"]})  # where ShareGPT's files have it
        text = rendered(self.tokenizer, messages, self._arguments(beside), f"a conversation of {source}")
        self._tell_of_parts(messages, text, source)
        added = added_start(self.tokenizer)
        return text if added is None else text.removeprefix(self.tokenizer.bos_token)

    def _arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a row says to the template: its own arguments, else the columns that are not transformers'."""
        own = _parsed(row.get(TEMPLATE_ARGUMENTS))
        named = {name: value for name, value in row.items() if name not in self.tokenizer.special_tokens_map}
        named |= own if isinstance(own, dict) else {}
        other = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() - {*SAID}
        left_out = {*other, *TEMPLATE_NAMES, *CHATS, TEMPLATE_ARGUMENTS}
        arguments = {name: value for name, value in named.items() if value is not None and name not in left_out}
        listed = {name: _parsed(arguments.pop(name)) for name in LISTED if name in arguments}
        documents = listed.get("documents")
        if not isinstance(documents, list) or not all(isinstance(item, Mapping) for item in documents):
            listed.pop("documents", None)  # an unrelated column of that name
        return arguments | {name: value for name, value in listed.items() if value != ""}

    def _tell_of_parts(self, messages: list[dict[str, Any]], text: str, source: str) -> None:
        """Warn once if a template writes content in parts as the Python list that it is."""
        parts = (message.get("content") for message in messages)
        if not self._told and any(isinstance(part, list) and str(part) in text for part in parts):
            self._told = True
            logger.warning(
                "The chat template writes content in parts of %s as Python lists; give such content as text.", source
            )


def rendered(
    tokenizer: Any, messages: list[Any], arguments: Mapping[str, Any], what: str, most_letters: int = MOST_LETTERS
) -> str:
    """Return the text that a chat template makes, within bounds.

    `what`: the messages in words. Raises `CalibrationError` if the template makes no text.
    """
    try:
        return bounded(
            lambda: str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments)),
            f"The tokenizer's chat template, for {what},",
            most_letters=most_letters,
        )
    except BoundError:
        raise
    except Exception as error:  # templates raise what they like; the cause is named and chained
        raise CalibrationError(
            f"The tokenizer's chat template does not take {what} ({cause(error)}); give text in its place."
        ) from error


def prompt_ids(tokenizer: Any, turns: list[Any], what: str, most_letters: int) -> Any:
    """Return the tokens `(1, length)`, int64, by which a model is asked to go on after these turns.

    `what`: the turns in words. Raises `CalibrationError` as `rendered`, and if the template writes nothing.
    """
    text = rendered(tokenizer, turns, {"add_generation_prompt": True}, what, most_letters)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    if ids.numel() == 0:
        raise CalibrationError(f"The tokenizer's chat template writes nothing of {what}; mend the template.")
    return ids


def added_start(tokenizer: Any) -> int | None:
    """Return the BOS that a tokenizer puts before every text; None if it puts none."""
    start = getattr(tokenizer, "bos_token_id", None)
    if start is None:
        return None
    ids = tokenizer("a", verbose=False)["input_ids"]
    return start if len(ids) > 1 and ids[0] == start else None


def _parsed(value: Any) -> Any:
    """Return what a cell states as JSON, as data sets keep tools, also in a list; anything else as it is."""
    if isinstance(value, list):
        return [_parsed(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _message(turn: Any, source: str) -> dict[str, Any]:
    """Return a turn as the template takes it, with all that it holds."""
    message = dict(turn) if isinstance(turn, Mapping) else {}
    if "role" not in message and {"from", "value"} <= message.keys():
        role = message.pop("from")
        message = {"role": ROLES.get(role, role), "content": message.pop("value")} | message
    if not isinstance(message.get("role"), str):
        raise CalibrationError(
            f"{source} holds {reprlib.repr(turn)} where a turn should be; give role and content, or from and value."
        )
    return message
