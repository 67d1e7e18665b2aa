"""The files of a finished job: weight files, config, tokenizer, report and card."""

import logging
from collections.abc import Sequence

from oneshot.checkpoint import Journal, card_metadata
from oneshot.checkpoint.compressed import original_parameters
from oneshot.export import (
    cast,
    notes_on_engines,
    part_dtype,
    planned_parts,
    quantise_result,
    write_companions,
    write_result_importance,
)
from oneshot.export.gguf import FILE_NAME
from oneshot.export.result_sensitivity import SENSITIVITY_TOKENS
from oneshot.families import with_text
from oneshot.job.job import Job
from oneshot.job.sizes import JobSizes
from oneshot.planning import Plan
from oneshot.profiling import IMPORTANCE_TOKENS
from oneshot.report.build import build_report
from oneshot.report.card import task_of, write_report
from oneshot.report.grams import gram_sentences
from oneshot.report.progress import ProgressBar, Stopwatch
from oneshot.report.records import LayerReport, Report
from oneshot.settings import RECIPE_NAME, recipe_text

logger = logging.getLogger(__name__)


def expect_parts(job: Job, sizes: JobSizes, journal: Journal) -> None:
    """Tell the journal which tensors come, so that it writes each to its place."""
    run, config = job.run, job.config
    further = run.further.result(sizes.plan)
    blocks = [] if further is None else further.blocks()
    beside = [] if further is None else further.outside(run.model.checkpoint.without_values())
    journal.expect(
        planned_parts(
            run.form,
            run.model,
            sizes.plan,
            sizes.subspaces,
            sizes.embedding,
            config.save_dtype,
            blocks=blocks,
            beside=beside,
        ),
        direct=run.form.is_safetensors,
        max_file_bytes=config.max_file_bytes,
        further=[name for part in (*blocks, *(read() for read in beside)) for name in part],
    )


def write_outside(job: Job, sizes: JobSizes, journal: Journal, layers: Sequence[LayerReport]) -> None:
    """Add the tensors outside the layers, which follow the layers in the journal, as far as it lacks them."""
    job.run.tracker.enter("writing")
    parts = job.run.form.outside(job.run.model, sizes.plan, sizes.subspaces, sizes.embedding)
    further = job.run.further.result(sizes.plan)
    if further is not None:
        parts += further.outside(job.run.model.checkpoint)
    for read in parts[journal.num_finished - len(layers) - job.run.further.num_blocks(sizes.plan) :]:
        journal.add(cast(job.config.save_dtype, read()))


def write_result(
    job: Job, sizes: JobSizes, journal: Journal, layers: Sequence[LayerReport], watch: Stopwatch
) -> Report:
    """Complete the result in the journal's folder, and return its report; only the first process does this."""
    run, config, plan, folder = job.run, job.config, sizes.plan, journal.partial
    source, form, stated = run.model.checkpoint, run.form, part_dtype(config.save_dtype)
    run.tracker.step("comparing the input with what was read", brief=True)
    weights_hash = job.weights_hash()  # a resumed run compares what it had no need to read
    written, further = form.config(run.model, plan), run.further.result(plan)
    if further is not None:
        written = with_text(run.model.family, written, dict(further.layers.stated))
    write_companions(source.folder, folder, written, dtype=None if stated == "keep" else stated)
    stored = {"dense": source.num_parameters, "compressed": _write_weights(job, sizes, journal)}
    original = original_parameters(source.folder)
    stored |= {} if original is None else {"original": original}
    watch.lap("write")
    if job.schedule.measures_importance:
        _write_importance(job, journal)
        watch.lap("importance")
    for sentence in (*gram_sentences(sizes.gram_notes, layers), *notes_on_engines(written)):
        logger.warning("%s", sentence)
    run.tracker.step("writing the report")
    report = build_report(
        config,
        run.method,
        plan,
        shape=run.model.shape,
        stacks={"dense": run.dense, "compressed": run.grid.stack(plan)},
        stored=stored,
        text=run.text if job.schedule.reads_text else None,
        layers=layers,
        seconds=watch.total(),
        hidden_error=None if sizes.subspaces is None else sizes.subspaces.mean_error(),
        predicted_divergence=sizes.divergences,
        predicted_curve=sizes.curve,
        footprint=job.footprint,
        fingerprint=job.fingerprint,
        weights_hash=weights_hash,
        timings=run.timings,
        further_parameters=None if further is None else _further_parameters(job, plan),
        warnings=run.warnings.of_all + sizes.warnings + run.warnings.take(),
    )
    (folder / RECIPE_NAME).write_text(recipe_text(config), encoding="utf-8")
    task = task_of(written)
    write_report(
        report,
        folder,
        card_metadata(source.folder),
        task=task,
        title=form.title,
        loading=form.loading(written),
        usage=form.usage(task),
    )
    return report


def _further_parameters(job: Job, plan: Plan) -> dict[str, int]:
    """Return the parameters of layers that predict tokens after the next one, before and after."""
    further = job.run.further
    return {"dense": further.most_parameters, "compressed": further.parameters(plan)}


def _write_importance(job: Job, journal: Journal) -> None:
    """Write the importance matrix beside a GGUF file, whose tensors get their types by it if they have any."""
    text, layers = job.run.text.first(IMPORTANCE_TOKENS), job.run.model.shape.num_hidden_layers
    with ProgressBar(job.run.tracker, num_layers=layers, total=text.num_tokens, stage="importance") as progress:
        path, machine = journal.partial / FILE_NAME, job.run.machine
        inputs = write_result_importance(path, text, job.config.text, machine, advance=progress.advance)
    if job.schedule.chooses_types:
        job.run.tracker.step("choosing the types of tensors")
        quantise_result(path, inputs, text.first(SENSITIVITY_TOKENS), machine, job.config)


def _write_weights(job: Job, sizes: JobSizes, journal: Journal) -> int:
    """Complete the weight files of the result, and return the parameters that they hold."""
    form = job.run.form
    with ProgressBar(job.run.tracker, total=0, unit="bytes") as progress:
        return form.write(job.run.model, sizes.plan, journal, progress.advance, job.config.save_dtype)
