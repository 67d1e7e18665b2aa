"""Results of ours whose layers have sizes of their own, given as inputs: the sentence that says what to do instead."""

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families import COMPRESSED, NAS_MODEL_TYPE

REPORT = "oneshot_report.json"  # of a result; `report.card` writes it


def refuse_compressed(config: Mapping[str, Any], folder: Path) -> None:
    """Raise `CheckpointError` for a result whose layers have sizes of their own: no family describes them.

    If the result's report is there, the sentence has the command that makes it smaller by the same share again, from
    the model it came from.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in COMPRESSED:
        return
    raise CheckpointError(
        f"{folder} is a compressed model whose layers have sizes of their own, which cannot be compressed again; "
        f"{again(folder, 'nemotron-nas' if model_type == NAS_MODEL_TYPE else 'per-layer')}."
    )


def again(folder: Path, form: str) -> str:
    """Return what to do in place of compressing a result again, with the command if the result's report is there."""
    origin, share, form = _told(folder, form)
    command = f": oneshot compress {shlex.quote(origin)} --form {form} --sparsity {share}" if origin else ""
    return f"start from the model it came from with a larger share{command}"


def _told(folder: Path, form: str) -> tuple[str, str, str]:
    """Return the origin, the share that is gone after a second time, and the form; an empty origin if it is not known.

    An origin in memory, or on another machine, is not known.
    """
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        stored, config = report["stored_parameters"], report["config"]
        kept, origin, form = stored["compressed"] / stored["dense"], str(config["checkpoint"]), str(config["form"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):  # no report of ours
        return "", "", form
    is_there = os.path.exists(os.path.expanduser(origin)) or (origin.count("/") == 1 and not origin.startswith("/"))
    return (origin if is_there and 0 < kept < 1 else ""), f"{1 - kept * kept:.2f}", form
