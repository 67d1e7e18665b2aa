"""Latencies that a plan was made by: a run that continues another one plans by the same, and does not measure again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oneshot.checkpoint import peek_saved
from oneshot.machine.durable import as_stored
from oneshot.report.card import REPORT_NAME

SAVED_TIMINGS = "timings"  # the journal's name for them, and the report's


def find_timings(outputs: Sequence[Path], measured_on: dict[str, Any]) -> list[list[float]]:
    """Return what an interrupted or finished run of one of these outputs measured; empty if none did.

    `measured_on`: JSON values that say what was measured and where; only equal ones count.
    """
    for output in outputs:
        for saved in (peek_saved(output, SAVED_TIMINGS), _reported(output)):
            if saved is not None and saved["measured_on"] == as_stored(measured_on):
                taken: list[list[float]] = saved["taken"]
                return taken
    return []


def _reported(output: Path) -> dict[str, Any] | None:
    """Return the timings in the report of a finished run; None without them, and if the report is damaged."""
    try:
        found = json.loads((output / REPORT_NAME).read_bytes())
        timings = found[SAVED_TIMINGS]
        return timings if timings is None or timings.keys() == {"measured_on", "taken"} else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # whether this matters is said when the report is read as a whole
