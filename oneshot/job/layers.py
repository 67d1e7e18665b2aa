"""The layers of a job, through the compressor into the journal."""

import time
from dataclasses import asdict
from functools import partial

import torch

from oneshot.checkpoint import Journal
from oneshot.compression import CompressedLayer, LayerCompressor, expanded, find_shared_heads
from oneshot.export import FurtherResult, cast
from oneshot.export.quantised import quantised_layer
from oneshot.job.job import Job
from oneshot.machine.memory import peak_bytes, peak_device_bytes
from oneshot.report.grams import worst
from oneshot.report.progress import ERROR_EXPLAINED, ProgressBar
from oneshot.report.records import LayerReport
from oneshot.stream import States, enter_further, read_ahead
from oneshot.tensors import Tensors


def compress_layers(job: Job, journal: Journal) -> list[LayerReport]:
    """Compress the layers in order into the journal; return a report of each, also of those already finished.

    Finished layers are only replayed, and not even that if no layer behind them is to be done.
    """
    run, model, plan, further = job.run, job.run.model, job.plan, job.further
    num_layers = model.shape.num_hidden_layers
    reports = [LayerReport.from_dict(record) for record in journal.records(min(journal.num_finished, num_layers))]
    if journal.num_finished >= num_layers + (0 if further is None else further.num_blocks):
        return reports
    # 1. what all layers are compressed by
    compressor, states = _compressor(job)
    # 2. every layer, unless only what follows them is to be done, which needs no states
    numbers = {layer: number for number, layer in enumerate(plan.kept_layers)}
    num_tokens, finished = 1 if states is None else states.num_tokens, len(reports)
    if finished < num_layers or states is not None:
        bar = ProgressBar(run.tracker, num_layers=num_layers, total=num_tokens, stage="layers", unit="layers")
        if states is not None:
            states.advance = bar.advance
        for layer, tensors in enumerate(read_ahead(model, run.machine.device)):
            if layer < finished:
                stored, scaffold = journal.reread(layer)
                working = scaffold or (run.form.original(model, numbers[layer], stored) if stored else {})
                compressor.replay_layer(layer, tensors, working)
            else:
                started = time.perf_counter()
                done = compressor.compress_layer(layer, tensors)
                saved = _stored(job, numbers[layer], done) if layer in numbers else {}
                report = LayerReport(
                    layer,
                    tuple(done.reports),
                    time.perf_counter() - started,
                    peak_bytes(),
                    peak_device_bytes(),
                    run.warnings.take(),
                    worst(run.machine.workers.gather(run.warnings.take_notes())),
                    done.rounding_errors,
                )
                # a resumed run moves its streams through the stored tensors unless these were folded, cast or packed
                is_stored = not saved or (
                    run.quantisation is None and _is_same(run.form.original(model, numbers[layer], saved), done.working)
                )
                journal.add(saved, record=asdict(report), scaffold=None if is_stored else done.working)
                bar.layer_done(report)
                reports.append(report)
                del done, saved
            if states is None:
                bar.advance(1)
            del tensors  # free before the next layer is waited for
    # 3. layers for tokens after the next one, which follow them
    if further is not None:
        _compress_further(job, further, states, journal)
    if states is not None:
        states.close()
    return reports


def _compressor(job: Job) -> tuple[LayerCompressor, States | None]:
    """Return the compressor of the model's layers, and the hidden states that it reads; None by weights alone."""
    run, schedule, seed = job.run, job.schedule, job.config.seed
    curvature = run.curvature if schedule.weighs_output else None
    if curvature is not None:
        run.watch.lap("curvature")
    if schedule.streams:
        run.tracker.say(ERROR_EXPLAINED)
    run.tracker.enter("layers")
    shared_heads: dict[str, torch.Tensor] = {}
    if schedule.finds_shared_heads:
        shared_heads = find_shared_heads(run.model, run.text, job.plan, run.method.heads, run.machine, seed=seed)
    states = _states(job) if schedule.streams else None
    compressor = LayerCompressor(
        run.model,
        run.method,
        job.plan,
        run.grid,
        run.machine,
        subspaces=job.subspaces,
        states=states,
        shared_heads=shared_heads,
        curvature=curvature,
        seed=seed,
        quantisation=run.quantisation,
    )
    return compressor, states


def _stored(job: Job, number: int, done: CompressedLayer) -> Tensors:
    """Return the tensors of a compressed layer, `number` in the result, as they are stored."""
    run, save_dtype = job.run, job.config.save_dtype
    if run.quantisation is None:
        return cast(save_dtype, run.form.layer(run.model, number, done.folded))
    return quantised_layer(run.form, run.model, number, done.folded, done.scales, run.quantisation, save_dtype)


def _states(job: Job) -> States:
    """Return the hidden states of the text, inside the first subspace of a smaller hidden size."""
    model, machine, subspaces = job.run.model, job.run.machine, job.subspaces
    norms_after, hidden_size = model.family.stack.norms_after, model.shape.hidden_size
    states = States(
        model,
        machine,
        job.run.text,
        dense_every=job.schedule.dense_every,
        compressed_embedding=expanded(job.tables, hidden_size, machine.device) if job.plan.embedding else None,
        compressed_norm=partial(subspaces.norm, position=0) if subspaces is not None and norms_after else None,
    )
    if subspaces is not None and not norms_after:
        states.defer(lambda x, _: subspaces.inside(x, 0))
        states.settle()
    return states


def _compress_further(job: Job, further: FurtherResult, states: States | None, journal: Journal) -> None:
    """Compress the blocks of layers that predict tokens after the next one, where the sizes of layers are theirs.

    They follow the model's layers in the journal; an interrupted run's are only replayed. `states`: after the
    model's last layer; None if the method chooses by weights alone.
    """
    run, first = job.run, job.run.model.shape.num_hidden_layers
    for index, layer in enumerate(further.layers.layers[: further.num_blocks]):
        if states is not None:
            states.advance = lambda tokens: None
            enter_further(states, run.model, layer, index)
        compressor = LayerCompressor(
            layer.model,
            run.method,
            further.plan_alone,
            run.form.grid(layer.model),
            run.machine,
            states=states,
            seed=job.config.seed,
            layers_before=first + index,
        )
        tensors = layer.model.read_layer(0)
        if first + index < journal.num_finished:
            stored, scaffold = journal.reread(first + index)
            compressor.replay_layer(0, tensors, scaffold or further.original(index, stored))
            continue
        done = compressor.compress_layer(0, tensors)
        saved = cast(job.config.save_dtype, further.layer(index, done.folded))
        is_stored = _is_same(further.original(index, saved), done.working)
        journal.add(saved, scaffold=None if is_stored else done.working)


def _is_same(stored: Tensors, working: Tensors) -> bool:
    """Return whether the streams passed exactly the stored tensors."""
    return stored.keys() == working.keys() and all(
        stored[name] is tensor or (stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor))
        for name, tensor in working.items()
    )
