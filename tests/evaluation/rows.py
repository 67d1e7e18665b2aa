"""Rows of `quality.jsonl` as the benchmarks write them."""

from typing import Any, Protocol

Rows = list[dict[str, Any]]

KINDS = ("wikitext2", "lambada", "boolq", "piqa", "pydoc")


def quality_row(recipe: str, **changes: Any) -> dict[str, Any]:
    """Return a row of a recipe with what all rows have; `changes` add to it or replace it."""
    return {
        "date": "2026-01-01",
        "commit": "abc",
        "dirty": False,
        "device": "a machine",
        "threads": 1,
        "model": "tiny",
        "max_windows": 4,
        "texts": {"wikitext2": {"token_hash": "1"}},
        "recipe": recipe,
        "sparsity": 0.2,
        "perplexity": dict.fromkeys(KINDS, 20.0),
    } | changes


class ShowRows(Protocol):
    """The fixture `show_rows`."""

    def __call__(self, quality: Rows, **others: Rows) -> None: ...
