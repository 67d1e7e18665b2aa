"""The layers of a job, through the compressor into the journal."""

from functools import partial

import torch

from oneshot.checkpoint import Journal
from oneshot.compression import LayerCompressor, expanded, find_shared_heads
from oneshot.export import write_layers
from oneshot.job.further import compress_further
from oneshot.job.job import Job
from oneshot.job.sizes import JobSizes
from oneshot.report.progress import ERROR_EXPLAINED, Stopwatch
from oneshot.report.records import LayerReport
from oneshot.stream import States


def compress_layers(job: Job, sizes: JobSizes, journal: Journal, watch: Stopwatch) -> list[LayerReport]:
    """Compress the layers into the journal; layers of an interrupted run are only replayed."""
    run, schedule, is_passed = job.run, job.schedule, job.passes_layers(sizes.plan, journal)
    model, machine, seed = run.model, run.machine, job.config.seed
    curvature = run.curvature if schedule.measures_curvature and is_passed else None
    if curvature is not None:
        watch.lap("curvature")
    if is_passed:
        if schedule.streams:
            run.tracker.say(ERROR_EXPLAINED)
        run.tracker.enter("layers")
    shared_heads: dict[str, torch.Tensor] = {}
    if schedule.finds_shared_heads and is_passed:
        shared_heads = find_shared_heads(model, run.text, sizes.plan, run.method.heads, machine, seed=seed)
    states = _states(job, sizes) if schedule.streams and is_passed else None
    compressor = LayerCompressor(
        model,
        run.method,
        sizes.plan,
        run.grid,
        machine,
        subspaces=sizes.subspaces,
        states=states,
        shared_heads=shared_heads,
        curvature=curvature,
        seed=seed,
    )
    reports = write_layers(
        model,
        sizes.plan,
        run.form,
        compressor,
        states,
        journal,
        machine=machine,
        save_dtype=job.config.save_dtype,
        warnings=run.warnings,
        tracker=run.tracker,
    )
    further = run.further.result(sizes.plan)
    if further is not None and is_passed:
        compress_further(job, further, states, journal)
    if states is not None:
        states.close()
    return reports


def _states(job: Job, sizes: JobSizes) -> States:
    """Return the hidden states of the text, inside the first subspace of a smaller hidden size."""
    run, subspaces, norm = job.run, sizes.subspaces, None
    model, machine = run.model, run.machine
    embedding = sizes.embedding
    first = None if embedding is None else expanded(embedding, model.shape.hidden_size, machine.device)
    norms_after = model.family.stack.norms_after
    if subspaces is not None and norms_after:
        norm = partial(subspaces.norm, position=0)
    states = States(
        model,
        machine,
        run.text,
        dense_every=job.schedule.dense_every,
        compressed_embedding=first,
        compressed_norm=norm,
    )
    if subspaces is not None and not norms_after:
        states.defer(lambda x, _: subspaces.inside(x, 0))
        states.settle()
    return states
