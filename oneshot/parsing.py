"""Words of a user: amounts such as `5.5B` and `8GiB`, short names of dtypes, and the word that was probably meant."""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches

from oneshot.errors import ConfigError

_COUNT_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_SIZE_SUFFIXES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
}


def parse_count(text: str) -> int:
    """Parse a number of parameters: `"5.5B"` is 5_500_000_000. Raises `ConfigError` for anything else."""
    return _parse(text, _COUNT_SUFFIXES, "a number of parameters such as 900M or 5.5B")


def parse_size(text: str) -> int:
    """Parse a number of bytes: `"8GiB"` is 8_589_934_592. Raises `ConfigError` for anything else."""
    return _parse(text, _SIZE_SUFFIXES, "a size in bytes such as 500MB or 8GiB")


def _parse(text: str, suffixes: dict[str, int], expected: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in suffixes:
        raise ConfigError(f"{text!r} is not {expected}.")
    amount = float(match[1]) * suffixes[match[2].upper()]
    if 0 < amount < 1:
        raise ConfigError(f"{text!r} is less than 1; give {expected}.")
    return int(amount)


def parse_share(text: str) -> float:
    """Parse a share: `"5%"` and `"0.05"` are 0.05.

    Raises `ConfigError` for anything else, also for 1 and more without `%`, which may be meant in per cent.
    """
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (1 if number == text.strip() else 100)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a share such as 5% or 0.05.") from error
    if number == text.strip() and share >= 1:
        raise ConfigError(f"{text!r} is a share of {share:.0%}; write {number}%, or {100 * share:g}% if it is meant.")
    return share


def full_dtype(name: str) -> str:
    """Return the full name of a dtype: `bf16` and `torch.bfloat16` are `bfloat16`. Other words stay."""
    plain = name.removeprefix("torch.")
    return _DTYPES.get(plain, plain)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: a question for the known word most like this one, or a full stop."""
    similar = get_close_matches(word, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else "."


def launched_rank() -> int:
    """Return this process's rank among those that a launcher started; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))
