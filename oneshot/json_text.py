"""JSON that every reader takes: RFC 8259 has no NaN and no Infinity, which Python's own writer writes."""

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, indent: int | None = 2) -> str:
    """Return a value as JSON, where numbers that are not finite are null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the numbers of a JSON object that `json_text` wrote: NaN for null."""
    return {name: math.nan if value is None else value for name, value in values.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
