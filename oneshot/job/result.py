"""The files of a job: weight files, config, tokenizer, report and card."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from oneshot.checkpoint import IMPORTANCE_NAME, Journal, card_metadata
from oneshot.checkpoint.compressed import original_parameters
from oneshot.export import (
    cast,
    notes_on_engines,
    part_dtype,
    planned_parts,
    quantise_result,
    write_companions,
    write_imatrix,
)
from oneshot.export.gguf import FILE_NAME
from oneshot.export.imatrix import TensorNames
from oneshot.export.outside import with_ranges
from oneshot.export.quantised import quantisation_config
from oneshot.export.result_model import result_importance
from oneshot.export.result_of_stock import open_result
from oneshot.families import with_text
from oneshot.job.job import Job
from oneshot.machine.memory import peak_bytes, peak_device_bytes
from oneshot.profiling import IMPORTANCE_TOKENS
from oneshot.report.card import task_of, write_report
from oneshot.report.grams import gram_sentences
from oneshot.report.progress import ProgressBar
from oneshot.report.provenance import versions
from oneshot.report.records import LayerReport, Report
from oneshot.settings import RECIPE_NAME, recipe_text
from oneshot.text import Text

logger = logging.getLogger(__name__)


def expect_parts(job: Job, journal: Journal) -> None:
    """Tell the journal which tensors come, so that it writes each to its place."""
    run, config, further = job.run, job.config, job.further
    blocks = [] if further is None else further.blocks()
    beside = [] if further is None else further.outside(run.model.checkpoint.without_values())
    journal.expect(
        planned_parts(
            run.form,
            run.model,
            job.plan,
            job.subspaces,
            job.tables,
            config.save_dtype,
            quantisation=run.quantisation,
            blocks=blocks,
            beside=beside,
        ),
        direct=run.form.is_safetensors,
        max_file_bytes=config.max_file_bytes,
        further=[name for part in (*blocks, *(read() for read in beside)) for name in part],
    )


def write_outside(job: Job, journal: Journal) -> None:
    """Add the tensors outside the layers, which follow the layers in the journal, as far as it lacks them."""
    run, further, before = job.run, job.further, job.run.model.shape.num_hidden_layers
    run.tracker.enter("writing")
    parts = with_ranges(run.form.outside(run.model, job.plan, job.subspaces), job.tables)
    if further is not None:
        parts += further.outside(run.model.checkpoint)
        before += further.num_blocks
    for read in parts[journal.num_finished - before :]:
        journal.add(cast(job.config.save_dtype, read()))


def write_result(job: Job, journal: Journal, layers: Sequence[LayerReport]) -> Report:
    """Complete the result in the journal's folder, and return its report; only the first process does this."""
    run, config, plan, form, folder = job.run, job.config, job.plan, job.run.form, journal.partial
    source, further, stated = run.model.checkpoint, job.further, part_dtype(config.save_dtype)
    # 1. the input is still what was read
    run.tracker.step("comparing the input with what was read", brief=True)
    weights_hash = job.weights_hash()  # a resumed run compares what it had no need to read
    # 2. config, tokenizer and weights
    written = form.config(run.model, plan)
    if further is not None:
        written = with_text(run.model.family, written, dict(further.layers.stated))
    if run.quantisation is not None:
        names = [place.name for place in journal.stored()]
        written |= {"quantization_config": quantisation_config(run.quantisation, written, names, journal.further)}
    write_companions(source.folder, folder, written, dtype=None if stated == "keep" else stated)
    bar = ProgressBar(run.tracker, total=0, unit="bytes")
    compressed = form.write(run.model, plan, journal, bar.advance, config.save_dtype)
    run.watch.lap("write")
    # 3. a GGUF file's importance matrix, and the types of its tensors
    if job.schedule.measures_importance:
        _write_importance(job, journal)
        run.watch.lap("importance")
    # 4. what the user is told
    notes = notes_on_engines(written) if form.opened_by == "transformers" else []
    for sentence in (*gram_sentences(job.gram_notes, layers), *notes):
        logger.warning("%s", sentence)
    run.tracker.step("writing the report")
    report = replace(_report(job, layers, compressed, weights_hash), file_bytes=_file_bytes(folder))
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


def _file_bytes(folder: Path) -> dict[str, int]:
    """Return the bytes of the weight files of a result and of their index, by name."""
    files = (path for pattern in ("*.safetensors*", "*.gguf") for path in folder.glob(pattern))
    return {path.name: path.stat().st_size for path in sorted(files)}


def _write_importance(job: Job, journal: Journal) -> None:
    """Write the importance matrix beside a GGUF file, whose tensors get their types by it if they have any."""
    text, layers = job.run.text.first(IMPORTANCE_TOKENS), job.run.model.shape.num_hidden_layers
    bar = ProgressBar(job.run.tracker, num_layers=layers, total=text.num_tokens, stage="importance")
    path, machine = journal.partial / FILE_NAME, job.run.machine
    result = open_result(path, text, machine)
    names = TensorNames(result.source.architecture, result.num_layers, has_experts=False)
    inputs = result_importance(result, bar.advance)
    write_imatrix(path.with_name(IMPORTANCE_NAME), inputs, names, text, result.config)
    if job.schedule.chooses_types:
        tracker = job.run.tracker
        tracker.step("choosing the types of tensors")

        def tell(layer: int) -> None:
            tracker.step(f"rounding layer {layer + 1} of {layers}", brief=True)

        quantise_result(path, inputs, text, machine, job.config, tell=tell)


def _report(job: Job, layers: Sequence[LayerReport], compressed: int, weights_hash: str) -> Report:
    """Return the report of a finished run, whose weight files hold `compressed` parameters."""
    run, config, plan, further = job.run, job.config, job.plan, job.run.further
    stored = {"dense": run.model.checkpoint.num_parameters, "compressed": compressed}
    original = original_parameters(run.model.checkpoint.folder)
    stored |= {} if original is None else {"original": original}
    stacks = {"dense": run.dense, "compressed": run.grid.stack(plan)}
    target = config.target
    asked = target.sparsity if target.parameters is None else 1 - target.parameters / stored["dense"]  # None of bytes
    return Report(
        config=config.to_dict(),
        method=asdict(run.method),
        versions=versions(),
        dense_shape=asdict(run.model.shape),
        plan=asdict(plan),
        stored_parameters=stored,
        layer_parameters={name: stack.all_layer_parameters() for name, stack in stacks.items()},
        flops_per_token={name: stack.flops_per_token() for name, stack in stacks.items()},
        kv_bytes_per_token={name: stack.kv_bytes_per_token() for name, stack in stacks.items()},
        sparsity={"asked": asked, "reached": 1 - stored["compressed"] / stored["dense"]},
        calibration=_calibration(run.text) if job.schedule.reads_text else None,
        layers=tuple(layers),
        seconds=run.watch.total(),
        peak_bytes=peak_bytes(),
        peak_device_bytes=peak_device_bytes(),
        hidden_error=None if job.subspaces is None else job.subspaces.mean_error(),
        predicted_divergence=job.divergences,
        predicted_curve=job.curve,
        mixture=job.mixture,
        footprint=job.footprint,
        fingerprint=job.fingerprint,
        weights_hash=weights_hash,
        timings=run.timings,
        warnings=run.warnings.of_all + job.warnings + run.warnings.take(),
        further_parameters=None
        if job.further is None
        else {"dense": further.most_parameters, "compressed": further.parameters(plan)},
    )


def _calibration(text: Text) -> dict[str, Any]:
    return {
        "source": text.source,
        "num_sequences": text.num_sequences,
        "sequence_length": text.longest,
        "num_tokens": text.num_tokens,
        "token_hash": text.token_hash,
    }
