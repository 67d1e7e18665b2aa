"""Layers and sublayers that stay as they are: patterns on the names of modules (`--keep`)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Literal

from oneshot.architecture import Description, ModelShape, Table
from oneshot.errors import ConfigError

Part = tuple[int, Literal["attention", "ffn"]]  # a layer, and what of it


@dataclass(frozen=True)
class Kept:
    """What stays as it is: the layers whose attention does, those whose FFN or experts do, and tables."""

    attention: frozenset[int] = frozenset()
    ffn: frozenset[int] = frozenset()
    tables: frozenset[Table] = frozenset()


NOTHING = Kept()


def find_kept(patterns: Sequence[str], family: Description, shape: ModelShape) -> Kept:
    """Return what patterns such as `layers.0.*`, `*.self_attn.*`, `layers.[0-3].mlp` and `embed_tokens` keep.

    A pattern is compared with the name of a linear and of every module around it, and may leave out beginnings.

    Raises `ConfigError` for a pattern that matches nothing that a run changes, and for a part of a sublayer: neurons
    and heads run through all its linears.
    """
    # 1. The names of what a run changes
    parts: dict[Part, set[str]] = {}
    for layer in range(shape.num_hidden_layers):
        for kind, names in _linears(family, shape, layer):
            parts.setdefault((layer, kind), set()).update(names)
    tables: dict[str, Table] = {family.stack.embedding.removesuffix(".weight"): "embedding"}
    if family.head is not None:
        tables[family.head.removesuffix(".weight")] = "embedding" if shape.tied else "output_head"
    # 2. Those that a pattern matches
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in set().union(tables, *parts.values()) if _matches(pattern, name)}
        if not matched:
            example = next(iter(sorted(parts[next(iter(parts))])))
            advised = [f"{_end(family.layer_prefix(0).removesuffix('.'), 2)}.*", *_modules_of(family, parts)]
            raise ConfigError(
                f"--keep {pattern} matches no linear of a layer and no table, which are called as {example} is; give a "
                f"pattern such as {', '.join(advised)} or {_end(min(tables), 1)}."
            )
        found |= matched
    # 3. The sublayers whose linears all match
    for (layer, _), names in parts.items():
        if found & names and not names <= found:
            missing, around = sorted(names - found), _around(names)
            is_layer = f"{around}." == family.layer_prefix(layer)
            remedy = (
                f"also keep {' and '.join(missing)}" if is_layer else f"keep all of layer {layer}'s {_end(around, 1)}"
            )
            raise ConfigError(
                f"--keep has {min(found & names)} without {missing[0]}, but neurons and heads run through all linears "
                f"of a sublayer; {remedy}."
            )
    whole = {part for part, names in parts.items() if names <= found}
    return Kept(
        frozenset(layer for layer, kind in whole if kind == "attention"),
        frozenset(layer for layer, kind in whole if kind == "ffn"),
        frozenset(table for name, table in tables.items() if name in found),
    )


def _linears(
    family: Description, shape: ModelShape, layer: int
) -> Iterator[tuple[Literal["attention", "ffn"], set[str]]]:
    """Yield the linears of each sublayer of a layer that a run may change, by their names in the model."""
    stack = family.stack_of(layer)
    prefix = stack.layer_prefix(layer)
    names = stack.feed_forward.axes(shape.layer(layer))
    yield "ffn", {prefix + name.removesuffix(".weight").removesuffix(".bias") for name in names}
    if stack.attentions:
        linears = [(*mixer.readers, *mixer.memory_readers, mixer.out) for mixer in stack.attentions]
        yield "attention", {prefix + name for names in linears for name in names}


def _modules_of(family: Description, parts: Mapping[Part, set[str]]) -> list[str]:
    """Return patterns for the modules of the first layer that hold a whole sublayer, and so in all layers."""
    layer = family.layer_prefix(0)
    inside = {_around(names) for (number, _), names in parts.items() if number == 0 and f"{_around(names)}." != layer}

    def divides(pattern: str, names: set[str]) -> bool:
        return len({_matches(pattern, name) for name in names}) > 1

    patterns = [f"*.{module.removeprefix(layer)}.*" for module in sorted(inside)]
    return [pattern for pattern in patterns if not any(divides(pattern, names) for names in parts.values())]


def _around(names: Collection[str]) -> str:
    """Return the name of the module that holds all linears of these names."""
    steps = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(own[0] for own in takewhile(lambda own: len(set(own)) == 1, steps))


def _end(name: str, steps: int) -> str:
    """Return the last steps of a module's name."""
    return ".".join(name.split(".")[-steps:])


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern is for a module or one that holds it, also without the beginning of its name."""
    steps = name.split(".")
    for end in range(1, len(steps) + 1):
        for start in range(end):
            if fnmatchcase(".".join(steps[start:end]), pattern):
                return True
    return False
