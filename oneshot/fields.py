"""The fields of options: their flags on the command line, and the checks of their values."""

from dataclasses import fields
from typing import Any, get_args, get_type_hints

from oneshot.errors import ConfigError

# Fields that have a flag of their own; every other field of Method and Target is a key of --set.
FLAGS = {
    "round_to": "--round-to",
    "up_steps": "--up-steps",
    "sparsity": "--sparsity",
    "parameters": "--params",
    "calibration": "--calibration",
    "num_sequences": "--num-sequences",
    "sequence_length": "--sequence-length",
    "device": "--device",
    "dtype": "--dtype",
    "batch_size": "--batch-size",
    "max_memory_bytes": "--max-memory",
    "max_device_memory_bytes": "--max-device-memory",
    "offload_dir": "--offload-dir",
    "seed": "--seed",
    "form": "--form",
    "save_dtype": "--save-dtype",
    "max_file_bytes": "--max-shard-size",
}


def display(name: str, value: Any) -> str:
    """Return a field and its value as they are written on the command line."""
    flag = FLAGS.get(name)
    return f"--set {name}={value}" if flag is None else f"{flag} {value}"


def check_choices(record: Any) -> None:
    """Raise `ConfigError` if a `Literal` field of a dataclass has a value outside its vocabulary."""
    for name, hint in get_type_hints(type(record)).items():
        allowed = [choice for choice in get_args(hint) if isinstance(choice, str)]
        for part in get_args(hint):
            allowed += [choice for choice in get_args(part) if isinstance(choice, str)]
        value = getattr(record, name)
        if isinstance(value, str) and allowed and value not in allowed:
            kinds = "a number or " if any(part in (int, float) for part in get_args(hint)) else "one of "
            raise ConfigError(f"{display(name, value)} is not {kinds}{', '.join(allowed)}.")


def check_minimum(record: Any, **minima: int) -> None:
    """Raise `ConfigError` if an integer field is below its minimum; None is allowed."""
    for name, minimum in minima.items():
        value = getattr(record, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{display(name, value)} is out of range: give at least {minimum}.")


def field_names(record: type) -> list[str]:
    """Return the fields of a dataclass."""
    return [field.name for field in fields(record)]
