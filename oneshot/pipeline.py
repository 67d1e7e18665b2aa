"""The order of the stages: open, plan, read text, profile, find subspaces, compress layers, export."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint import (
    GgufCheckpoint,
    Journal,
    card_metadata,
    open_gguf,
    open_headers,
    output_folder,
    refuse_output,
    refuse_place,
    remove_leftovers,
)
from oneshot.compression import (
    Curvature,
    LayerCompressor,
    StreamSubspaces,
    expanded,
    find_shared_heads,
    find_subspaces,
    reduce_embedding,
)
from oneshot.config import Config
from oneshot.errors import ConfigError
from oneshot.export import (
    FORMS,
    cast,
    form_of,
    part_dtype,
    planned_parts,
    with_kept_dtype,
    write_companions,
    write_layers,
)
from oneshot.footprint import current_bounds, offload_folder, refuse_conversion, with_conversion
from oneshot.machine.memory import release_heap, reset_peak
from oneshot.planning import (
    Budget,
    Grid,
    Plan,
    Profile,
    make_plan,
    predicted_divergences,
    profiled_damages,
    spread_hidden_sizes,
)
from oneshot.profiling import refuse_existing, save_profile
from oneshot.report.build import build_report
from oneshot.report.card import REPORT_NAME, task_of, write_report
from oneshot.report.grams import gram_sentences
from oneshot.report.progress import ProgressBar, Shown, Stopwatch, announce
from oneshot.report.records import Footprint, LayerReport, Report
from oneshot.run import SAVED_TEXT, Run, open_run
from oneshot.schedule import Schedule, make_schedule, profile_schedule
from oneshot.settings import RECIPE_NAME, recipe_text
from oneshot.stream import States
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)

EMBEDDING = "embedding"  # the journal's name for a reduced embedding


def compress(config: Config, *, show_progress: Shown = False) -> Report:
    """Compress a checkpoint into `config.output` and return the report that is also written there.

    Nothing appears at the output before it is complete. The same seed, machine and thread count give the same bytes,
    also if a run was interrupted and another continued with `config.resume`.

    Raises a subclass of `OneshotError` with one sentence for everything that a user can mend.
    """
    watch = Stopwatch()
    config = with_kept_dtype(config, open_gguf(config.checkpoint))
    with open_run(config, [output_folder(config.output)], show_progress=show_progress) as run:
        return _compress(config, run, watch)


def compress_sizes(config: Config, sparsities: Sequence[float], *, show_progress: Shown = False) -> list[Report]:
    """Compress once for every sparsity, into `OUT/sparsity-0.10` and so on; text and profile are shared.

    All targets are planned before the first run, so that one out of reach is refused before any work.
    """
    config = with_kept_dtype(config, open_gguf(config.checkpoint))
    configs = [
        replace(
            config,
            target=replace(config.target, sparsity=sparsity),
            output=str(Path(config.output) / f"sparsity-{sparsity:.2f}"),
        )
        for sparsity in sparsities
    ]
    if len({one.output for one in configs}) < len(configs):
        raise ConfigError("Two of the --sparsity values are equal to two decimals; give each once.")
    watch = Stopwatch()
    # the largest target decides whether a model needs further tensors
    largest = max(configs, key=lambda one: one.target.sparsity or 0)
    with open_run(largest, [output_folder(one.output) for one in configs], show_progress=show_progress) as run:
        for one in configs:
            plan = make_plan(run.grid, run.method, one.target, budget=run.budget(one.target))
            run.footprint(one, _schedule(one, run, plan), plan)
            _refuse_place(one, run)
        reports = []
        for one in configs:  # what all share counts for the first
            reports.append(_compress(one, run, watch))
            watch = Stopwatch()
            reset_peak()
        return reports


def predict(config: Config) -> Footprint:
    """Return what `compress` would take: a bound of its memory, its disk, its parameters, and roughly its time.

    It reads headers only, no weights and no text, and writes nothing. The plan has equal layers; a profile may
    distribute the same parameters otherwise, which the bound covers. A latency budget is taken as one of FLOPs, because
    measuring a layer needs its weights.

    Raises as `compress` for everything that is known before the first weight is read.
    """
    offload_folder(config.machine)
    with torch.inference_mode():
        source = open_headers(config.checkpoint, Path(), config.revision)
        gguf = source if isinstance(source, GgufCheckpoint) else None
        config = with_kept_dtype(config, gguf)
        run = Run(config, Path(), source=source)
        if gguf is not None:
            bounds = current_bounds(config.machine, run.machine.device)
            refuse_conversion(config.checkpoint, gguf, config.machine, bounds)
        _refuse_place(config, run)
        target = config.target
        if target.budget == "latency":
            target = replace(target, budget="flops")
        plan = make_plan(run.grid, run.method, target, budget=run.budget(target))
        _refuse_config(run, plan)
        return with_conversion(run.footprint(config, _schedule(config, run, plan), plan, dry=True), gguf)


def profile(config: Config, *, show_progress: Shown = False) -> Profile:
    """Profile the model and save it to `config.output`, for later plans. Raises as `compress`."""
    output = output_folder(config.output)
    refuse_existing(output)
    with open_run(config, show_progress=show_progress) as run:
        schedule = profile_schedule(run.grid, run.method)
        run.check_text()
        run.store_activations(run.footprint(config, schedule, None).store)
        run.check_family()
        measured = run.make_profile(schedule)
        for sentence in gram_sentences(run.machine.workers.gather(run.warnings.take_notes()), []):
            logger.warning("%s", sentence)
        if run.machine.workers.is_main:
            save_profile(measured, output)
        return measured


def _compress(config: Config, run: Run, watch: Stopwatch) -> Report:
    """Compress one target of a run. `watch` has the seconds since the target began."""
    model, grid = run.model, run.grid
    _refuse_place(config, run)
    output, budget = output_folder(config.output), run.budget(config.target)
    plan = run.machine.workers.share(0, lambda: make_plan(grid, run.method, config.target, budget=budget))
    _refuse_config(run, plan)
    schedule = _schedule(config, run, plan)
    footprint = run.footprint(config, schedule, plan)
    run.store_activations(footprint.store)
    run.check_family()
    fingerprint = run.fingerprint(config, schedule)
    finished = _finished_report(output, fingerprint) if config.resume else None
    if finished is not None:
        if run.machine.workers.is_main:
            remove_leftovers(output, fingerprint)
        return finished
    refuse_output(output, overwrite=config.overwrite, resume=config.resume and not output.exists())
    run.machine.workers.wait()  # barrier: finish checks before writing
    watch.lap("prepare")
    curvature = None
    with _journal(config, run, plan, fingerprint) as journal:
        if run.written_text is not None:
            journal.save(SAVED_TEXT, {"token_ids": run.written_text.token_ids.tolist()})
        if schedule.measures_curvature and not (schedule.plans_by_profile and journal.saved("plan")):
            curvature = run.curvature  # which a profile reads
            watch.lap("curvature")
        plan, divergences = _measured_plan(config, run, plan, budget, schedule, journal)
        if schedule.plans_by_profile:
            watch.lap("profile")
        plan, subspaces = _find_subspaces(config, run, plan)
        if schedule.finds_subspaces:
            watch.lap("hidden size")
        warnings, notes = run.warnings.take(), run.machine.workers.gather(run.warnings.take_notes())
        embedding = journal.saved_tensors(EMBEDDING) if plan.embedding else None
        journal.expect(
            planned_parts(run.form, model, plan, subspaces, embedding, config.save_dtype),
            direct=run.form.is_safetensors,
            max_file_bytes=config.max_file_bytes,
        )
        if schedule.measures_curvature and curvature is None and _passes_layers(run, journal):
            curvature = run.curvature
            watch.lap("curvature")
        layers = _compress_layers(config, run, plan, schedule, subspaces, embedding, curvature, journal)
        watch.lap("layers")
        for read in run.form.outside(model, plan, subspaces, embedding)[journal.num_finished - len(layers) :]:
            journal.add(cast(config.save_dtype, read()))
        report = None
        if run.machine.workers.is_main:
            stated = part_dtype(config.save_dtype)
            source, folder = model.checkpoint, journal.partial
            written = run.form.config(model, plan)
            write_companions(source.folder, folder, written, dtype=None if stated == "keep" else stated)
            stored = {"dense": source.num_parameters, "compressed": _write_weights(config, run, plan, journal)}
            watch.lap("write")
            for sentence in gram_sentences(notes, layers):
                logger.warning("%s", sentence)
            announce("writing the report", run.show_progress)
            report = build_report(
                config,
                run.method,
                plan,
                shape=model.shape,
                stacks={"dense": run.dense, "compressed": grid.stack(plan)},
                stored=stored,
                text=run.text if schedule.reads_text else None,
                layers=layers,
                seconds=watch.total(),
                hidden_error=None if subspaces is None else subspaces.mean_error(),
                predicted_divergence=divergences,
                footprint=footprint,
                fingerprint=fingerprint,
                warnings=warnings + run.warnings.take(),
            )
            form, inherited = run.form, card_metadata(source.folder)
            task = task_of(written)
            opening = {"title": form.title, "loading": form.loading(written), "usage": form.usage(task)}
            (folder / RECIPE_NAME).write_text(recipe_text(config), encoding="utf-8")
            write_report(report, folder, inherited, task=task, **opening)
        journal.commit()
        report = run.machine.workers.share(0, lambda: report)
    assert report is not None
    return report


def _schedule(config: Config, run: Run, plan: Plan) -> Schedule:
    """Return the stages of a run, whose text is there if they read it."""
    tokens, has_profile = config.text.num_tokens, config.profile is not None
    schedule = make_schedule(run.method, plan, run.grid, num_tokens=tokens, has_profile=has_profile)
    if schedule.reads_text:
        run.check_text()
    return schedule


def _refuse_place(config: Config, run: Run) -> None:
    """Raise `OutputError` if the result cannot appear at its place."""
    refuse_place(output_folder(config.output), run.model.checkpoint, overwrite=config.overwrite, resume=config.resume)


def _refuse_config(run: Run, plan: Plan) -> None:
    """Raise `PlanError` before any work if the form's config cannot state the plan."""
    if run.grid.stack(plan) != run.model.shape.stack():
        run.form.config(run.model, plan)


def _measured_plan(
    config: Config, run: Run, plan: Plan, budget: Budget, schedule: Schedule, journal: Journal
) -> tuple[Plan, dict[str, float] | None]:
    """Return the plan made from a profile, if the schedule has one, and the divergences that the profile predicts.

    What was measured is saved: a profile takes long, and latencies would differ the next time. The embedding at its
    planned ranks is also saved, because it needs the profile.
    """
    saved = journal.saved("plan")
    if saved is not None:
        return Plan.from_dict(saved["plan"]), saved["divergences"]
    divergences = None
    if schedule.plans_by_profile:
        measured = run.profile(schedule)
        announce("planning the sizes of the layers", run.show_progress)
        damages = profiled_damages(measured, run.method.allocation, run.grid)
        plan = run.machine.workers.share(0, lambda: make_plan(run.grid, run.method, config.target, damages, budget))
        grids: dict[str, Grid] = {name: form_of(name, run.model.family).grid(run.model) for name in FORMS}
        divergences = predicted_divergences(grids, config.method, config.target, plan, measured, budget)
        if plan.embedding and run.machine.workers.is_main:
            device = run.machine.device
            evidence = measured.embedding_gram.to(device), measured.embedding_probabilities.to(device)
            tensors = reduce_embedding(run.model.read_embedding(), *evidence, plan.embedding)
            journal.save_tensors(EMBEDDING, tensors)
        release_heap()  # of the profile and of the planner's solver
    if schedule.plans_by_profile or config.target.budget == "latency":
        journal.save("plan", {"plan": asdict(plan), "divergences": divergences})
    return plan, divergences


def _find_subspaces(config: Config, run: Run, plan: Plan) -> tuple[Plan, StreamSubspaces | None]:
    """Return the subspaces of a smaller hidden size, and the plan with the widths that suit them."""
    if plan.hidden is None:
        return plan, None
    shape, method = run.model.shape, run.method
    with ProgressBar(
        num_layers=shape.num_hidden_layers,
        num_tokens=run.text.num_tokens,
        visible=run.show_progress,
        description="hidden size",
    ) as progress:
        subspaces = find_subspaces(
            run.model,
            run.text,
            plan.hidden.group_of,
            run.machine,
            token_weighting=method.token_weighting,
            shared_weight=method.shared_weight,
            kind=method.hidden,
            seed=config.seed,
            advance=progress.advance,
        )
    if method.allocation == "error" and not config.target.states_hidden_size and plan.hidden.num_groups > 1:
        wanted = config.target.wanted_parameters(run.dense.stored_parameters())
        plan = spread_hidden_sizes(
            run.grid, plan, subspaces.energies, target_parameters=wanted, round_to=config.target.round_to
        )
    assert plan.hidden is not None
    return plan, StreamSubspaces(subspaces, plan.hidden, run.machine.device)


def _compress_layers(
    config: Config,
    run: Run,
    plan: Plan,
    schedule: Schedule,
    subspaces: StreamSubspaces | None,
    embedding: Tensors | None,
    curvature: Curvature | None,
    journal: Journal,
) -> list[LayerReport]:
    """Compress the layers into the journal; those of an interrupted run are only replayed."""
    model, machine, states = run.model, run.machine, None
    shared_heads: dict[str, torch.Tensor] = {}
    if schedule.finds_shared_heads and _passes_layers(run, journal):
        shared_heads = find_shared_heads(model, run.text, plan, run.method.heads, machine, seed=config.seed)
    if schedule.streams and _passes_layers(run, journal):
        first = None if embedding is None else expanded(embedding, model.shape.hidden_size, machine.device)
        norms_after, norm = model.family.stack.norms_after, None
        if subspaces is not None and norms_after:
            norm = partial(subspaces.norm, position=0)
        states = States(
            model,
            machine,
            run.text,
            dense_every=schedule.dense_every,
            compressed_embedding=first,
            compressed_norm=norm,
        )
        if subspaces is not None and not norms_after:
            states.defer(lambda x, _: subspaces.inside(x, 0))
            states.settle()
    compressor = LayerCompressor(
        model,
        run.method,
        plan,
        run.grid,
        machine,
        subspaces=subspaces,
        states=states,
        shared_heads=shared_heads,
        curvature=curvature,
        seed=config.seed,
    )
    return write_layers(
        model,
        plan,
        run.form,
        compressor,
        states,
        journal,
        machine=machine,
        save_dtype=config.save_dtype,
        warnings=run.warnings,
        show_progress=run.show_progress,
    )


def _passes_layers(run: Run, journal: Journal) -> bool:
    """Return whether a layer is not finished, so that the run needs what layers are compressed by."""
    return journal.num_finished < run.model.shape.num_hidden_layers


def _journal(config: Config, run: Run, plan: Plan, fingerprint: dict[str, Any]) -> Journal:
    """Open the journal of a run."""
    return Journal(
        output_folder(config.output),
        fingerprint=fingerprint,
        workers=run.machine.workers,
        overwrite=config.overwrite,
        resume=config.resume,
        expected_bytes=sum(run.result_bytes(config, plan)),
        background=run.machine.device.type == "cuda",
    )


def _write_weights(config: Config, run: Run, plan: Plan, journal: Journal) -> int:
    """Complete the weight files of the result, and return the parameters that they hold."""
    visible = run.show_progress and not run.form.is_safetensors  # the files of others are written by now
    with ProgressBar(num_layers=1, num_tokens=0, visible=visible, description="writing", unit="B") as progress:
        return run.form.write(run.model, plan, journal, progress.advance, config.save_dtype)


def _finished_report(output: Path, fingerprint: dict[str, Any]) -> Report | None:
    """Return the report of a finished run with this fingerprint; None if the output is another run's."""
    path = output / REPORT_NAME
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    return Report.from_dict(values) if values.get("fingerprint") == fingerprint else None
