"""JSON files that every reader takes: numbers that are not finite are null."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeConfig, build_model

import oneshot
from oneshot.json_text import json_text, numbers
from oneshot.pipeline import compress
from oneshot.report.records import Report

# modules that write JSON of their own: keys of caches, headers, and copies of JSON that was read
WITHOUT_NUMBERS = {
    "api/texts.py",
    "checkpoint/gguf.py",
    "checkpoint/gguf_tokenizer.py",
    "checkpoint/layout.py",
    "checkpoint/safe_files.py",
    "checkpoint/stock.py",
    "checkpoint/weight_files.py",
    "export/companions.py",
    "json_text.py",
}


def strict(text: str) -> Any:
    """Parse JSON as other languages do."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null() -> None:
    values = {"a": [1.5, math.nan, (math.inf,)], "b": -math.inf, "c": 3, "d": None}
    assert strict(json_text(values)) == {"a": [1.5, None, [None]], "b": None, "c": 3, "d": None}
    assert math.isnan(numbers({"a": None})["a"])


def test_no_other_module_writes_numbers() -> None:
    package = Path(oneshot.__file__).parent
    writing = {str(path.relative_to(package)) for path in package.rglob("*.py") if "json.dump" in path.read_text()}
    assert writing == WITHOUT_NUMBERS


def test_a_report_is_json(save_model: Any, make_config: MakeConfig) -> None:
    """Errors measured beside such a weight overflow."""
    model = build_model()
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[0, 0] = 1e30
    config = make_config(save_model(model))
    report = compress(config)
    with pytest.raises(ValueError, match="not JSON compliant"):
        json.dumps(report.to_dict(), allow_nan=False)
    for path in Path(config.output).rglob("*.json"):
        strict(path.read_text())
    Report.from_dict(strict((Path(config.output) / "oneshot_report.json").read_text()))
