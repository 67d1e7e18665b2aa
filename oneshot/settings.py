"""Options that are written as text: `key=value` of `--set`, and recipe files, which are YAML with one option a line."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from oneshot.config import PARTS, SPELLINGS, Config, Target, part_of
from oneshot.errors import ConfigError, cause
from oneshot.fields import FLAGS, display, field_names
from oneshot.method import Method
from oneshot.parsing import did_you_mean

RECIPE_NAME = "recipe.yaml"
TARGETS = ("sparsity", "params", "parameters", "max_size", "size_bytes", "max_loss")  # one replaces another
NOT_IN_RECIPE = ("output", "overwrite", "resume")
MEASURED = "loss_scale"  # for all options of a run; with another option it is another run's
HEADER = """\
# oneshot compress --config recipe.yaml --output OUT
# makes this result again: on the same machine, with the same number of threads and packages, the same bytes.
"""
LOST = "# null: it was an object in memory, so it must be given again.\n"


def settings() -> dict[str, type]:
    """Return the keys of `--set`, each with the record that has it."""
    return {name: record for record in (Method, Target) for name in field_names(record) if name not in FLAGS}


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `key=value` of `--set`. Raises `ConfigError` for an unknown key and for a value of another type."""
    key, separator, value = text.partition("=")
    key = key.strip().replace("-", "_")
    known = settings()
    if not separator or key not in known:
        if key in FLAGS:
            raise ConfigError(f"--set {text} is not understood: {key} has an option of its own; give {FLAGS[key]}.")
        hint = did_you_mean(key, known) if separator else "."
        raise ConfigError(f"--set {text} is not understood; write key=value with a key of --help-methods{hint}")
    return key, parse_value(key, value.strip(), get_type_hints(known[key])[key])


def parse_value(key: str, text: str, hint: Any) -> Any:
    """Parse a value by the type of its field. Raises `ConfigError` if it is of another type."""
    kinds = (hint, *get_args(hint))
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                pass
    takes_words = any(isinstance(choice, str) for part in kinds for choice in (part, *get_args(part)))
    if not takes_words:
        raise ConfigError(f"{display(key, text)} is not {'an integer' if int in kinds else 'a number'}.")
    return text


def read_recipe(path: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat options of a recipe file, as `Config.of` takes them; those that are `given` replace the file's.

    Raises `ConfigError` for a file that cannot be read, unknown options, and options that are null and not given.
    """
    import yaml

    if not os.path.isfile(os.path.expanduser(path)):
        raise ConfigError(f"{path} is not a file; give a recipe file, such as the one that oneshot init writes.")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        values, twice = yaml.safe_load(text), _key_given_twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML ({cause(error)}); oneshot init writes an example.") from error
    if twice is not None:
        raise ConfigError(f"{path} gives {twice} twice; remove one of both.")
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold lines of option: value; oneshot init writes an example.")
    if "set" in values:
        raise ConfigError(f"{path} has a line set:, but keys of --set have lines of their own, such as heads: id.")
    options: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        options[name] = _typed(name, value)
    if any(name in TARGETS for name in given):
        options = {name: value for name, value in options.items() if name not in TARGETS}
    if given.keys() - set(NOT_IN_RECIPE):
        options.pop(MEASURED, None)
    options |= given
    for name, value in options.items():
        if value is None:
            raise ConfigError(f"{path} leaves {name} empty, because it was not a file or a name; give it yourself.")
    return options


def _key_given_twice(node: Any) -> str | None:
    """Return the first key that a composed YAML mapping has twice, at any depth; None if none is."""
    from yaml import MappingNode, ScalarNode, SequenceNode

    if isinstance(node, SequenceNode):
        return next(filter(None, map(_key_given_twice, node.value)), None)
    if not isinstance(node, MappingNode):
        return None
    seen = set[str]()
    for key, value in node.value:
        name = str(key.value).replace("-", "_") if isinstance(key, ScalarNode) else ""
        name = SPELLINGS[name][0] if name in SPELLINGS else name
        if name in seen:
            return str(key.value)
        seen.add(name)
        if (inner := _key_given_twice(value)) is not None:
            return inner
    return None


def _typed(name: str, value: Any) -> Any:
    """Return a number for a text such as `1e-3`, which YAML does not take for one."""
    if value is None:
        return None
    field = SPELLINGS[name][0] if name in SPELLINGS else name
    hint = get_type_hints(PARTS[part_of(field)])[field]
    is_number = isinstance(value, str) and name not in SPELLINGS and float in (hint, *get_args(hint))
    return parse_value(field, value, hint) if is_number else value


def recipe_text(config: Config, *, in_memory: Sequence[str] = ()) -> str:
    """Return the recipe file that makes a config again; the output is given when it is used.

    `in_memory`: options that were objects and not names.
    """
    import yaml

    options = {name: value for name, value in config.options().items() if name not in NOT_IN_RECIPE}
    options |= dict.fromkeys(in_memory)
    return HEADER + LOST * bool(in_memory) + yaml.safe_dump(options, sort_keys=False, allow_unicode=True)
