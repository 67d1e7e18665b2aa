"""Numbers of models side by side: one record for the terminal, the report, its page and the card."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Cell = tuple[float | None, float | None]  # a number, and its standard error if it has one


@dataclass(frozen=True)
class Comparison:
    """What `oneshot evaluate` measured. It has names, and no paths.

    Attributes:
        models: their names; of two the second is the baseline.
        rows: of every number its name, and a cell for each model; None where a model has no such number.
        words: sentences on what they mean.
        date: when they were measured, in ISO 8601 and UTC; empty if they are not kept.
        settings: the options that were given or have a default.
        texts: of every text its windows, tokens and the hash of the tokens.
        versions: of the programs that measured.
    """

    models: tuple[str, ...]
    rows: dict[str, tuple[Cell | None, ...]]
    words: tuple[str, ...] = ()
    date: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Comparison":
        """Return the inverse of `dataclasses.asdict`, also after JSON."""
        rows = {
            name: tuple(None if cell is None else (cell[0], cell[1]) for cell in cells)
            for name, cells in values["rows"].items()
        }
        return Comparison(
            **{**values, "models": tuple(values["models"]), "words": tuple(values["words"]), "rows": rows}
        )

    @property
    def when(self) -> str:
        """Return the date for people."""
        return f"{self.date[:16].replace('T', ' ')} UTC"

    def table(self) -> list[list[str]]:
        """Return the headings and the rows, rounded for people; of two models also the ratio."""
        is_pair = len(self.models) == 2
        lines = [["", *self.models, *["ratio"] * is_pair]]
        for name, cells in self.rows.items():
            lines.append([name, *map(_shown, cells), *([_ratio(*cells)] if is_pair else [])])
        return lines

    def repeats(self, other: "Comparison") -> bool:
        """Return whether both are of the same models, texts and options."""
        return (self.models, self.settings, self.texts) == (other.models, other.settings, other.texts)


def _shown(cell: Cell | None) -> str:
    """Return a number rounded for people, with its standard error if it has one; a dash if it is not known."""
    value, error = (None, None) if cell is None else cell
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    places = 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 4
    number = f"{value:,.{places}f}"
    return number if error is None or math.isnan(error) else f"{number} ± {error:.{places}f}"


def _ratio(first: Cell | None, second: Cell | None) -> str:
    if first is None or second is None or first[0] is None or not second[0]:
        return "–"
    return f"{first[0] / second[0]:.3f}"
