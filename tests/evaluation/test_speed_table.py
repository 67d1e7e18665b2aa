"""The tables of speed, from made-up rows: a line is one file, and the newest row of a case counts."""

import importlib
from typing import Any

from rows import ShowRows


def speed_row(**changes: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-01",
        "commit": "abc",
        "dirty": False,
        "device": "a machine",
        "threads": 1,
        "model": "tiny",
        "form": "per-layer",
        "asked": 0.2,
        "budget": "parameters",
        "settings": {},
        "seed": 0,
        "calibration": "text.jsonl",
        "calibration_tokens": 1024,
        "calibration_hash": "1",
        "stored_parameters": 1_600_000,
        "dense_parameters": 2_000_000,
        "file_bytes": 3_200_000,
        "place": "cpu",
        "dtype": "float32",
        "mode": "eager",
        "batch": 1,
        "length": 512,
        "expanded": None,
        "laid_out": False,
        "prefill_ratio": 0.8,
        "decode_ratio": 0.9,
        "score": 1.25,
    } | changes


ROWS = [
    speed_row(prefill_ratio=9.0),
    speed_row(),
    speed_row(batch=16, prefill_ratio=0.7, decode_ratio=0.6),
    speed_row(length=2048, prefill_ratio=0.5),
    speed_row(mode="compiled", prefill_ratio=0.4),
    speed_row(form="stock", score=1.5, stored_parameters=1_620_000),
    speed_row(laid_out=True, decode_ratio=0.7),
    speed_row(budget="latency", settings={"curvature": "fisher"}, expanded=0.9),
]


def lines_of(table: str) -> dict[str, list[str]]:
    """Return the cells of every line by its first cell."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {first: cells for first, *cells in lines}


def test_the_table_of_all_cases(show_rows: ShowRows) -> None:
    show_rows([], speed=ROWS)
    lines = lines_of(importlib.import_module("tables.speed").every_speed_table())
    assert len(lines["file"]) == 3 + 4
    found = dict(zip(lines["file"], lines["per-layer, −20%"], strict=True))
    assert found["CPU, float32, eager, 1 × 2048"] == "0.50 · 0.90"
    assert found["CPU, float32, compiled, 1 × 512"] == "0.40 · 0.90"


def test_a_newer_row_without_a_score_has_that_of_its_file(show_rows: ShowRows) -> None:
    newer, laid_out = speed_row(prefill_ratio=0.6), speed_row(laid_out=True)
    del newer["score"], laid_out["score"]
    show_rows([], speed=[speed_row(), newer, laid_out])
    lines = lines_of(importlib.import_module("tables.speed").every_speed_table())
    assert lines["per-layer, −20%"] == ["1.25", "0.80", "3", "0.60 · 0.90"]
    assert lines["per-layer, −20%, `lay_out_()`"][0] == "1.25"


def test_a_newer_file_of_the_same_name_replaces_the_older_one(show_rows: ShowRows) -> None:
    older, newer = speed_row(length=2048), speed_row(calibration_hash="2", file_bytes=6_400_000, score=1.2)
    show_rows([], speed=[older, newer])
    lines = lines_of(importlib.import_module("tables.speed").every_speed_table())
    assert lines["per-layer, −20%"] == ["1.20", "0.80", "6 in float32", "0.80 · 0.90"]
