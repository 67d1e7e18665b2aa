"""The order of the stages: open, plan, read text, profile, find subspaces, compress layers, export."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint import Journal, gguf_header, output_folder, refuse_output, refuse_place
from oneshot.compression import LayerCompressor, StreamSubspaces, expanded, find_subspaces, reduce_embedding
from oneshot.config import Config
from oneshot.errors import ConfigError
from oneshot.export import FORMS, cast, expected_bytes, verify, write_companions, write_layers
from oneshot.footprint import current_bounds, offload_folder, refuse_conversion, with_conversion
from oneshot.machine.memory import peak_bytes, peak_device_bytes, reset_peak
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
from oneshot.report.card import REPORT_NAME, write_report
from oneshot.report.progress import ProgressBar, Stopwatch
from oneshot.report.provenance import versions
from oneshot.report.records import Footprint, Report
from oneshot.run import SAVED_TEXT, Run, open_run
from oneshot.schedule import Schedule, make_schedule, profile_schedule
from oneshot.stream import States

Tensors = dict[str, torch.Tensor]

EMBEDDING = "embedding"  # the journal's name for a reduced embedding


def compress(config: Config, *, show_progress: bool = False) -> Report:
    """Compress a checkpoint into `config.output` and return the report that is also written there.

    Nothing appears at the output before it is complete. The same seed, machine and thread count give the same bytes,
    also if a run was interrupted and another continued with `config.resume`.

    Raises a subclass of `OneshotError` with one sentence for everything that a user can mend.
    """
    with open_run(config, [output_folder(config.output)], show_progress=show_progress) as run:
        return _compress(config, run)


def compress_sizes(config: Config, sparsities: Sequence[float], *, show_progress: bool = False) -> list[Report]:
    """Compress once for every sparsity, into `OUT/sparsity-0.10` and so on; text and profile are shared.

    All targets are planned before the first run, so that one out of reach is refused before any work.
    """
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
    # the largest target decides whether a model needs further tensors
    largest = max(configs, key=lambda one: one.target.sparsity or 0)
    with open_run(largest, [output_folder(one.output) for one in configs], show_progress=show_progress) as run:
        for one in configs:
            plan = make_plan(run.grid, run.method, one.target, budget=run.budget(one.target))
            run.footprint(one, _schedule(one, run, plan), plan)
            _refuse_place(one, run)
        return [_compress(one, run) for one in configs]


def predict(config: Config) -> Footprint:
    """Return what `compress` would take: a bound of its memory, its disk, its parameters, and roughly its time.

    It reads headers only, no weights and no text, and writes nothing. The plan has equal layers; a profile may
    distribute the same parameters otherwise, which the bound covers. A latency budget is taken as one of FLOPs, because
    measuring a layer needs its weights.

    Raises as `compress` for everything that is known before the first weight is read.
    """
    offload_folder(config.machine)
    with torch.inference_mode():
        header = gguf_header(config.checkpoint)
        run = Run(config, Path(), header=header)
        if header is not None:
            bounds = current_bounds(config.machine, run.machine.device)
            refuse_conversion(config.checkpoint, header, config.machine, bounds)
        _refuse_place(config, run)
        target = config.target
        if target.budget == "latency":
            target = replace(target, budget="flops")
        plan = make_plan(run.grid, run.method, target, budget=run.budget(target))
        _refuse_config(run, plan)
        return with_conversion(run.footprint(config, _schedule(config, run, plan), plan, dry=True), header)


def profile(config: Config, *, show_progress: bool = False) -> Profile:
    """Measure what smaller sizes cost into the folder `config.output`, for later plans. Raises as `compress`."""
    output = output_folder(config.output)
    refuse_existing(output)
    with open_run(config, show_progress=show_progress) as run:
        schedule = profile_schedule(run.grid)
        run.store_activations(run.footprint(config, schedule, None).store)
        measured = run.make_profile(schedule)
        if run.machine.workers.is_main:
            save_profile(measured, output)
        return measured


def _compress(config: Config, run: Run) -> Report:
    """Compress one target of a run."""
    watch, model, grid, form = Stopwatch(), run.model, run.grid, FORMS[config.form]
    reset_peak()
    _refuse_place(config, run)
    budget = run.budget(config.target)
    plan = run.machine.workers.share(0, lambda: make_plan(grid, run.method, config.target, budget=budget))
    _refuse_config(run, plan)
    schedule = _schedule(config, run, plan)
    footprint = run.footprint(config, schedule, plan)
    run.store_activations(footprint.store)
    fingerprint = run.fingerprint(config, schedule)
    output = output_folder(config.output)
    if config.resume and output.exists():
        finished = _finished_report(output, fingerprint)
        if finished is not None:
            return finished
        refuse_output(output, overwrite=config.overwrite, resume=False)
    run.machine.workers.wait()  # all must have looked before one of them writes
    watch.lap("prepare")
    parameters = grid.stack(plan).stored_parameters()
    num_layers = model.shape.num_hidden_layers
    with Journal(
        output,
        num_parts=num_layers + len(form.outside(model, plan, None, None)),
        fingerprint=fingerprint,
        workers=run.machine.workers,
        overwrite=config.overwrite,
        resume=config.resume,
        expected_bytes=expected_bytes(config.save_dtype, model.checkpoint, parameters),
        max_file_bytes=config.max_file_bytes,
    ) as journal:
        if run.written_text is not None:
            journal.save(SAVED_TEXT, {"token_ids": run.written_text.token_ids.tolist()})
        plan, divergences = _measured_plan(config, run, plan, budget, schedule, journal)
        watch.lap("profile")
        plan, subspaces = _subspaces(config, run, plan, schedule)
        watch.lap("hidden size")
        embedding = journal.saved_tensors(EMBEDDING) if plan.embedding else None
        states = None
        if schedule.streams and journal.num_finished < num_layers:
            states = _states(run, schedule, embedding, subspaces)
        compressor = LayerCompressor(
            model, run.method, plan, grid, run.machine, subspaces=subspaces, states=states, seed=config.seed
        )
        warnings = run.warnings.take()
        layers = write_layers(
            model,
            plan,
            form,
            compressor,
            states,
            journal,
            save_dtype=config.save_dtype,
            warnings=run.warnings,
            show_progress=run.show_progress,
        )
        watch.lap("layers")
        for read in form.outside(model, plan, subspaces, embedding)[journal.num_finished - num_layers :]:
            journal.add(cast(config.save_dtype, read()))
        journal.join()
        report = None
        if run.machine.workers.is_main:
            write_companions(
                model.checkpoint.folder,
                journal.partial,
                form.config(model, plan),
                dtype=None if config.save_dtype == "keep" else config.save_dtype,
            )
            form.finish(journal.partial)
            compressed = verify(journal.partial).num_parameters
            watch.lap("write")
            report = Report(
                config=config.to_dict(),
                method=asdict(run.method),
                versions=versions(),
                plan=asdict(plan),
                **_sizes(config, run, plan, compressed),
                dense_shape=asdict(model.shape),
                calibration=_described_text(run) if schedule.reads_text else None,
                layers=tuple(layers),
                seconds=watch.total(),
                peak_bytes=peak_bytes(),
                peak_device_bytes=peak_device_bytes(),
                hidden_error=None if subspaces is None else subspaces.mean_error(),
                predicted_divergence=divergences,
                footprint=footprint,
                fingerprint=fingerprint,
                warnings=warnings + run.warnings.take(),
            )
            write_report(report, model.checkpoint.folder, journal.partial, title=form.title, loading=form.loading)
        journal.commit()
        shared = run.machine.workers.share(0, lambda: report)
    assert shared is not None
    return shared


def _schedule(config: Config, run: Run, plan: Plan) -> Schedule:
    return make_schedule(run.method, plan, run.grid, has_profile=config.profile is not None)


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
        damages = profiled_damages(measured, run.method.allocation)
        plan = run.machine.workers.share(0, lambda: make_plan(run.grid, run.method, config.target, damages, budget))
        grids: dict[str, Grid] = {name: form.grid(run.model) for name, form in FORMS.items()}
        divergences = predicted_divergences(grids, run.method, config.target, plan, measured, budget)
        if plan.embedding and run.machine.workers.is_main:
            device = run.machine.device
            evidence = measured.embedding_gram.to(device), measured.embedding_probabilities.to(device)
            tensors = reduce_embedding(run.model.read_embedding(), *evidence, plan.embedding)
            journal.save_tensors(EMBEDDING, tensors)
    if schedule.plans_by_profile or config.target.budget == "latency":
        journal.save("plan", {"plan": asdict(plan), "divergences": divergences})
    return plan, divergences


def _subspaces(config: Config, run: Run, plan: Plan, schedule: Schedule) -> tuple[Plan, StreamSubspaces | None]:
    """Return the subspaces of a smaller hidden size, and the plan with the widths that suit them."""
    if plan.hidden is None or not schedule.finds_subspaces:
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
            advance=progress.advance,
        )
    if config.target.hidden_size is None and plan.hidden.num_groups > 1:
        wanted = config.target.wanted_parameters(run.dense.stored_parameters())
        plan = spread_hidden_sizes(
            run.grid, plan, subspaces.energies, target_parameters=wanted, round_to=config.target.round_to
        )
    assert plan.hidden is not None
    return plan, StreamSubspaces(subspaces, plan.hidden, run.machine.device)


def _states(run: Run, schedule: Schedule, embedding: Tensors | None, subspaces: StreamSubspaces | None) -> States:
    """Return the streams at the embedding."""
    first = None if embedding is None else expanded(embedding, run.model.shape.hidden_size)
    states = States(run.model, run.machine, run.text, two=schedule.two_streams, compressed_embedding=first)
    if subspaces is not None:
        states.defer(lambda x, _: subspaces.inside(x, 0))
        states.settle()
    return states


def _finished_report(output: Path, fingerprint: dict[str, Any]) -> Report | None:
    """Return the report of a finished run with this fingerprint; None if the output is another run's."""
    path = output / REPORT_NAME
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    return Report.from_dict(values) if values.get("fingerprint") == fingerprint else None


def _sizes(config: Config, run: Run, plan: Plan, compressed: int) -> dict[str, Any]:
    """Return the report's sizes before and after."""
    dense = run.model.checkpoint.num_parameters
    stacks = {"dense": run.dense, "compressed": run.grid.stack(plan)}
    target = config.target
    asked = target.sparsity if target.parameters is None else 1 - target.parameters / dense
    return {
        "stored_parameters": {"dense": dense, "compressed": compressed},
        "layer_parameters": {name: stack.all_layer_parameters() for name, stack in stacks.items()},
        "flops_per_token": {name: stack.flops_per_token() for name, stack in stacks.items()},
        "kv_bytes_per_token": {name: stack.kv_bytes_per_token() for name, stack in stacks.items()},
        "sparsity": {"asked": asked, "reached": 1 - compressed / dense},
    }


def _described_text(run: Run) -> dict[str, Any]:
    """Return the report's description of the calibration text."""
    return {
        "source": run.text.source,
        "num_sequences": len(run.text.token_ids),
        "sequence_length": run.text.token_ids.shape[1],
        "num_tokens": run.text.num_tokens,
        "token_hash": run.text.token_hash,
    }
