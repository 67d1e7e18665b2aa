"""What tells a run that it continues an earlier one, and what it takes over from the output: dtype and latencies."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from oneshot_kernels.backend import ENVIRONMENT_VARIABLE

from oneshot.checkpoint import Model, card_metadata, peek_fingerprint, peek_saved
from oneshot.checkpoint.safe_files import companion_hashes
from oneshot.machine import Machine
from oneshot.machine.dtype import COMPUTE_DTYPES
from oneshot.machine.durable import as_stored
from oneshot.parsing import full_dtype
from oneshot.report.card import REPORT_NAME
from oneshot.report.provenance import code_hash, processor_name, versions

SAVED_TIMINGS = "timings"  # the journal's name for them, and the report's


def environment(model: Model, machine: Machine) -> dict[str, Any]:
    """Return the part of a fingerprint that is known before the text: input, machine and code."""
    device = machine.device
    return {
        "model": model.checkpoint.content_hash(),  # the journal has hashes of all that was read
        "files": companion_hashes(model.checkpoint.folder),
        "card": card_metadata(model.checkpoint.folder),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": processor_name(),
        "kernels": os.environ.get(ENVIRONMENT_VARIABLE, ""),
        "dtype": str(machine.dtype),
        "batch_size": machine.batch_size,
        "threads": torch.get_num_threads(),
        "processes": machine.workers.size,
        "versions": versions(),
        "code": code_hash(),
    }


def earlier_dtype(outputs: Sequence[Path]) -> str | None:
    """Return the dtype of the first interrupted or finished run of these outputs; None without one."""
    for output in outputs:
        for fingerprint in (peek_fingerprint(output), reported(output, "fingerprint")):
            name = full_dtype(str((fingerprint or {}).get("dtype")))
            if name in COMPUTE_DTYPES:
                return name
    return None


def earlier_timings(outputs: Sequence[Path], measured_on: dict[str, Any]) -> list[list[float]]:
    """Return the latencies of an interrupted or finished run of one of these outputs; empty if none measured any.

    `measured_on`: JSON values that say what was measured and where; only equal ones count.
    """
    for output in outputs:
        for saved in (peek_saved(output, SAVED_TIMINGS), reported(output, SAVED_TIMINGS)):
            if saved is None or saved.keys() != {"measured_on", "taken"}:
                continue
            if saved["measured_on"] == as_stored(measured_on):
                taken: list[list[float]] = saved["taken"]
                return taken
    return []


def reported(output: Path, name: str) -> dict[str, Any] | None:
    """Return a field in the report of a finished run; None without one, and if the report is damaged."""
    try:
        found = json.loads((output / REPORT_NAME).read_bytes())[name]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # whether this matters is said when the report is read as a whole
    return found if isinstance(found, dict) else None
