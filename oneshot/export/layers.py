"""Every layer through the compressor into the journal; layers of an interrupted run are replayed."""

import time
from dataclasses import asdict

import torch

from oneshot.checkpoint import Journal, Model
from oneshot.compression import LayerCompressor
from oneshot.config import SaveDtype
from oneshot.export.forms import Form
from oneshot.export.saving import cast
from oneshot.machine import Machine
from oneshot.machine.memory import peak_bytes, peak_device_bytes
from oneshot.machine.prefetch import prefetch
from oneshot.machine.transfer import pinned
from oneshot.planning import Plan
from oneshot.report.grams import worst
from oneshot.report.progress import ProgressBar, Tracker, WarningLog
from oneshot.report.records import LayerReport
from oneshot.stream import States
from oneshot.tensors import Tensors


def write_layers(
    model: Model,
    plan: Plan,
    form: Form,
    compressor: LayerCompressor,
    states: States | None,
    journal: Journal,
    *,
    machine: Machine,
    save_dtype: SaveDtype,
    warnings: WarningLog,
    tracker: Tracker,
) -> list[LayerReport]:
    """Compress the layers in order into the journal; return a report of each, also of those already finished.

    `states` are behind the last layer then; None if the method chooses by weights alone or if no more is to be done.
    """
    num_layers = model.shape.num_hidden_layers
    numbers = {layer: number for number, layer in enumerate(plan.kept_layers)}
    finished = min(journal.num_finished, num_layers)
    reports = [LayerReport.from_dict(record) for record in journal.records(finished)]
    if finished == num_layers and states is None:
        return reports
    num_tokens = 1 if states is None else states.num_tokens
    with ProgressBar(tracker, num_layers=num_layers, total=num_tokens, stage="layers", unit="layers") as progress:
        if states is not None:
            states.advance = progress.advance
        read = prefetch(lambda layer: pinned(model.read_layer(layer), machine.device), num_layers)
        for layer, tensors in enumerate(read):
            if layer < finished:
                stored, scaffold = journal.reread(layer)
                working = scaffold or (form.original(model, numbers[layer], stored) if stored else {})
                compressor.replay_layer(layer, tensors, working)
            else:
                started = time.perf_counter()
                done = compressor.compress_layer(layer, tensors)
                named = form.layer(model, numbers[layer], done.folded) if layer in numbers else {}
                saved = cast(save_dtype, named)
                report = LayerReport(
                    layer,
                    tuple(done.reports),
                    time.perf_counter() - started,
                    peak_bytes(),
                    peak_device_bytes(),
                    warnings.take(),
                    worst(machine.workers.gather(warnings.take_notes())),
                )
                # a resumed run moves its streams through the stored tensors unless these were folded or cast
                is_stored = not saved or is_same(form.original(model, numbers[layer], saved), done.working)
                journal.add(saved, record=asdict(report), scaffold=None if is_stored else done.working)
                progress.layer_done(report)
                reports.append(report)
                del done, named, saved
            if states is None:
                progress.advance(1)
            del tensors  # free before the next layer is waited for
    return reports


def is_same(stored: Tensors, working: Tensors) -> bool:
    """Return whether the streams passed exactly the stored tensors."""
    return stored.keys() == working.keys() and all(
        stored[name] is tensor or (stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor))
        for name, tensor in working.items()
    )
