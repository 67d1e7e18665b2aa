"""The names that stored tensors have in their stock class, as transformers itself finds them when it loads a file.

Files may lack the module of a class that holds everything but its head (`base_model_prefix`), have it where the class
does not, or have names of older classes (transformers' registry of conversions).
"""

import re
from collections.abc import Iterable
from typing import Any

from oneshot.errors import CheckpointError

NUMBER = re.compile(r"\.\d+\.")  # of a layer, an expert, …


class _Places(dict[str, bool]):
    """The places of a model's tensors: what transformers looks names up in.

    A sample has few layers and experts, so a name in them is known by what is before its first number.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(map(_place, names), True))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(_place(name), default)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(_place(str(name)))


def names_in_class(sample: Any, stored: Iterable[str]) -> dict[str, str]:
    """Return the stored name of every tensor by the name that it has in the class of `sample`.

    What is behind the number of a layer stays: families know these names (`families/`). Names without a place in the
    class also stay.

    Args:
        sample: a model of transformers with layers of every stack.

    Raises `CheckpointError` if two stored tensors have one place.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    renamings: list[Any] = [one for one in get_model_conversion_mapping(sample) if not isinstance(one, WeightConverter)]
    places, prefix = _Places(sample.state_dict()), sample.base_model_prefix
    found: dict[str, str] = {}
    for name in stored:
        renamed, _ = rename_source_key(name, renamings, [], prefix, places)
        if renamed not in places and name in places:
            renamed, _ = rename_source_key(name, [], [], prefix, places)
        own = _place(renamed) + name.removeprefix(_place(name)) if renamed in places else name
        if own in found:
            raise CheckpointError(f"{found[own]} and {name} are both {own} of the model; remove one of them.")
        found[own] = name
    return found


def _place(name: str) -> str:
    """Return a name up to its first number; all of it if it has none."""
    number = NUMBER.search(name)
    return name if number is None else name[: number.start() + 1]
