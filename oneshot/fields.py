"""The fields of options: their flags on the command line, and the checks of their values."""

import reprlib
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from oneshot.errors import ConfigError
from oneshot.parsing import did_you_mean

# Fields that have a flag of their own, most of them by their names; every other field of Method and Target is a key of
# --set.
SAME_NAMES = (
    *("round_to", "serve", "up_steps", "sparsity", "max_loss", "budget", "keep", "calibration", "num_sequences"),
    *("sequence_length", "device", "dtype", "batch_size", "offload_dir", "seed", "form", "save_dtype", "bits"),
    *("quantise", "revision", "tie", "profile", "recipe", "max_windows", "kind", "tasks", "limit", "include_path"),
    *("prefill_tokens", "decode_tokens"),
)
FLAGS = {name: f"--{name.replace('_', '-')}" for name in SAME_NAMES} | {
    "parameters": "--params",
    "size_bytes": "--max-size",
    "max_memory_bytes": "--max-memory",
    "max_device_memory_bytes": "--max-device-memory",
    "max_file_bytes": "--max-shard-size",
    "gguf_bytes": "--max-file-size",
}


OWN_TYPES = ((Integral, int), (Real, float), (str, str))  # instead of other libraries


def display(name: str, value: Any) -> str:
    """Return a field and its value as they are written on the command line."""
    flag = FLAGS.get(name)
    return f"--set {name}={value}" if flag is None else f"{flag} {value}"


def check_values(record: Any) -> None:
    """Raise `ConfigError` if a field of a dataclass has a value of another type, or a word outside its vocabulary.

    Numbers and texts of other libraries become Python's own.
    """
    record_class: Any = type(record)
    for name, kinds in _kinds_of_fields(record_class).items():
        value = getattr(record, name)
        words = [kind for kind in kinds if isinstance(kind, str)]
        if isinstance(value, str) and words and value not in words:
            expected = "a number or " if int in kinds or float in kinds else "one of "
            similar = did_you_mean(value, words)
            raise ConfigError(f"{display(name, value)} is not {expected}{', '.join(words)}{similar}")
        if not any(_is(value, kind) for kind in kinds):
            stated = f"{display(name, reprlib.repr(value))} is of the type {type(value).__name__}"
            raise ConfigError(f"{stated}; give {_described(kinds)}.")
        if type(value).__module__ != "builtins":  # such as NumPy's, which YAML and JSON lack
            plain: Any = next((own for kind, own in OWN_TYPES if isinstance(value, kind)), None)
            if plain is not None:
                object.__setattr__(record, name, plain(value))


@cache  # resolving the annotations of a class takes milliseconds, and planning makes many records
def _kinds_of_fields(record: type) -> dict[str, list[Any]]:
    """Return the types and words that every field of a dataclass takes."""
    return {name: _members(hint) for name, hint in get_type_hints(record).items()}


def _members(hint: Any) -> list[Any]:
    """Return the types and words that a hint such as `float | Literal["auto"]` stands for."""
    parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) in (Union, Literal) else [hint]
    return [each for part in parts for each in (get_args(part) if get_origin(part) is Literal else [part])]


def _is(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type, or the word itself; whole numbers are also floating-point numbers."""
    if isinstance(kind, str):
        return bool(value == kind)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


def _described(kinds: list[Any]) -> str:
    """Return what a field takes, in words."""
    names: dict[Any, str] = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    names[tuple[str, ...]] = "a list of texts"
    shown = [names.get(kind, str(kind)) for kind in kinds if kind is not type(None)]
    return " or ".join(shown)


def check_minimum(record: Any, **minima: int) -> None:
    """Raise `ConfigError` if an integer field is below its minimum; None is allowed."""
    for name, minimum in minima.items():
        value = getattr(record, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{display(name, value)} is out of range: give at least {minimum}.")


def field_names(record: type) -> list[str]:
    """Return the fields of a dataclass."""
    return [field.name for field in fields(record)]
