"""Read of a result of ours how large its original was, and advise what to do in place of compressing it again."""

import json
import os
import shlex
from pathlib import Path

REPORT = "oneshot_report.json"  # of a result; `report.card` writes it


def again(folder: Path) -> str:
    """Return what to do in place of compressing a result again, with the command if the result's report is there.

    There is no command for an origin in memory, or on another machine.
    """
    advice = "start from the model it came from with a larger share"
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        stored, config = report["stored_parameters"], report["config"]
        kept, origin, form = stored["compressed"] / stored["dense"], str(config["checkpoint"]), str(config["form"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):  # no report of ours
        return advice
    is_there = os.path.exists(os.path.expanduser(origin)) or (origin.count("/") == 1 and not origin.startswith("/"))
    if not is_there or not 0 < kept < 1:
        return advice
    return f"{advice}: oneshot compress {shlex.quote(origin)} --form {form} --sparsity {1 - kept * kept:.2f}"


def original_parameters(folder: Path) -> int | None:
    """Return the parameters of the model that a result of ours came from; None if no report in the folder says it."""
    try:
        stored = json.loads((folder / REPORT).read_text(encoding="utf-8"))["stored_parameters"]
        return int(stored.get("original", stored["dense"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no report of ours
        return None
