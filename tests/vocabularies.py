"""Values of every key of `--set`: all words of a vocabulary, and a few numbers for each size."""

from typing import Any, get_args, get_type_hints

from oneshot.settings import settings

NUMBERS: dict[str, tuple[str, ...]] = {
    "damping": ("0.01",),
    "expert_damping": ("0.1",),
    "expert_residual_weight": ("0.5",),
    "group_size": ("0", "1", "2"),
    "hidden_rate": ("0.1", "0.25"),
    "hidden_size": ("16", "28"),
    "inner_rate": ("0.1", "0.25"),
    "intermediate_size": ("16", "40"),
    "loss_scale": ("1.5",),
    "num_experts": ("2", "3"),
    "pivot_group_size": ("16",),
    "query_key_size": ("4", "6"),
    "residual_weight": ("0", "1"),
    "shared_weight": ("0.5",),
    "sketch_size": ("96",),
    "value_size": ("4", "6"),
}


def words(hint: Any) -> list[str]:
    """Return the words that a hint such as `float | Literal["auto"]` allows."""
    return [one for part in (hint, *get_args(hint)) for one in (part, *get_args(part)) if isinstance(one, str)]


SETTINGS: dict[str, list[str]] = {
    key: [*dict.fromkeys(words(get_type_hints(record)[key])), *NUMBERS.get(key, ())]
    for key, record in settings().items()
}
