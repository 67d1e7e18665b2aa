"""The report of a finished run."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from oneshot.architecture import ModelShape, StackShape
from oneshot.config import Config
from oneshot.machine.memory import peak_bytes, peak_device_bytes
from oneshot.method import Method
from oneshot.planning import Plan
from oneshot.report.provenance import versions
from oneshot.report.records import LayerReport, Report
from oneshot.text import Text


def build_report(
    config: Config,
    method: Method,
    plan: Plan,
    *,
    shape: ModelShape,
    stacks: dict[str, StackShape],
    stored: dict[str, int],
    text: Text | None,
    layers: Sequence[LayerReport],
    **measured: Any,
) -> Report:
    """Return the report of a run.

    Args:
        method: settled for the form. stacks, stored: sizes and stored parameters, `dense` and `compressed`.
        text: None if none was read. measured: other fields of `Report`.
    """
    target = config.target
    # None if bytes are asked for
    asked = target.sparsity if target.parameters is None else 1 - target.parameters / stored["dense"]
    return Report(
        config=config.to_dict(),
        method=asdict(method),
        versions=versions(),
        dense_shape=asdict(shape),
        plan=asdict(plan),
        stored_parameters=stored,
        layer_parameters={name: stack.all_layer_parameters() for name, stack in stacks.items()},
        flops_per_token={name: stack.flops_per_token() for name, stack in stacks.items()},
        kv_bytes_per_token={name: stack.kv_bytes_per_token() for name, stack in stacks.items()},
        sparsity={"asked": asked, "reached": 1 - stored["compressed"] / stored["dense"]},
        calibration=None if text is None else _described(text),
        layers=tuple(layers),
        peak_bytes=peak_bytes(),
        peak_device_bytes=peak_device_bytes(),
        **measured,
    )


def _described(text: Text) -> dict[str, Any]:
    return {
        "source": text.source,
        "num_sequences": text.num_sequences,
        "sequence_length": text.longest,
        "num_tokens": text.num_tokens,
        "token_hash": text.token_hash,
    }
