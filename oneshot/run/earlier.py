"""What a run that continues an earlier one takes over from its output: its dtype, and the latencies it measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oneshot.checkpoint import peek_fingerprint, peek_saved
from oneshot.machine.dtype import COMPUTE_DTYPES
from oneshot.machine.durable import as_stored
from oneshot.parsing import full_dtype
from oneshot.report.card import REPORT_NAME

SAVED_TIMINGS = "timings"  # the journal's name for them, and the report's


def earlier_dtype(outputs: Sequence[Path]) -> str | None:
    """Return the dtype of the first interrupted or finished run of these outputs; None without one."""
    for output in outputs:
        for fingerprint in (peek_fingerprint(output), _reported(output, "fingerprint")):
            name = full_dtype(str((fingerprint or {}).get("dtype")))
            if name in COMPUTE_DTYPES:
                return name
    return None


def earlier_timings(outputs: Sequence[Path], measured_on: dict[str, Any]) -> list[list[float]]:
    """Return the latencies of an interrupted or finished run of one of these outputs; empty if none measured any.

    `measured_on`: JSON values that say what was measured and where; only equal ones count.
    """
    for output in outputs:
        for saved in (peek_saved(output, SAVED_TIMINGS), _reported(output, SAVED_TIMINGS)):
            if saved is None or saved.keys() != {"measured_on", "taken"}:
                continue
            if saved["measured_on"] == as_stored(measured_on):
                taken: list[list[float]] = saved["taken"]
                return taken
    return []


def _reported(output: Path, name: str) -> dict[str, Any] | None:
    """Return a field in the report of a finished run; None without one, and if the report is damaged."""
    try:
        found = json.loads((output / REPORT_NAME).read_bytes())[name]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # whether this matters is said when the report is read as a whole
    return found if isinstance(found, dict) else None
