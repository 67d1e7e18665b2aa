"""The order of the stages: open, plan, read text, profile, find subspaces, compress layers, export."""

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from oneshot.checkpoint import (
    Checkpoint,
    GgufCheckpoint,
    complete_text_config,
    open_gguf,
    open_headers,
    output_folder,
    refuse_file,
    refuse_unwritable,
)
from oneshot.config import Config
from oneshot.errors import CheckpointError, ConfigError, OutputError, cause
from oneshot.export import OriginalTypes, price_original, tensor_names, with_kept_dtype, write_imatrix
from oneshot.footprint import TYPES, current_bounds, offload_folder, refuse_conversion, with_conversion
from oneshot.job import (
    Job,
    compress_layers,
    decide_sizes,
    expect_parts,
    plan_jobs,
    tell_of_missed_target,
    write_outside,
    write_result,
)
from oneshot.json_text import json_text
from oneshot.planning import Profile, mixture_verdict, refuse_idle
from oneshot.profiling import (
    IMPORTANCE_TOKENS,
    RANKING,
    VERDICT,
    measure_importance,
    ranking_lines,
    refuse_existing,
    save_profile,
)
from oneshot.report.grams import gram_sentences
from oneshot.report.mixture import verdict_record
from oneshot.report.progress import ProgressBar, Shown, Tracker, unheard
from oneshot.report.records import Footprint, Report
from oneshot.run import Run, footprint_of, open_run, paths_read, stages_of
from oneshot.schedule import Schedule, profile_schedule

PLANNED_SHARE = 0.1  # of the parameters: any share that goes makes the same profile
logger = logging.getLogger(__name__)


def compress(config: Config, *, show_progress: Shown | Tracker = False) -> Report:
    """Compress a checkpoint into `config.output` and return the report that is also written there.

    Nothing appears at the output before it is complete. The same seed, machine and thread count give the same bytes,
    also if a run was interrupted and another continued with `config.resume`.

    Raises a subclass of `OneshotError` with one sentence for everything that a user can mend.
    """
    if config.target.max_loss is not None:
        raise ConfigError("--max-loss is judged by a check at the end, which this run leaves out; ask for a size.")
    config = with_kept_dtype(config, open_gguf(config.checkpoint))
    refuse_ahead([config])
    with open_run(config, [output_folder(config.output)], show_progress) as run:
        [job] = plan_jobs([config], run)
        return compress_job(job)


def compress_sizes(
    config: Config, sparsities: Sequence[float], *, show_progress: Shown | Tracker = False
) -> list[Report]:
    """Compress once for every sparsity, into `OUT/sparsity-0.10` and so on; text and profile are shared.

    All targets are planned before the first run, so that one out of reach is refused before any work.
    """
    configs = configs_of(with_kept_dtype(config, open_gguf(config.checkpoint)), sparsities)
    refuse_ahead(configs)
    with open_run(_largest(configs), [output_folder(one.output) for one in configs], show_progress) as run:
        reports = []
        for job in plan_jobs(configs, run):  # what all share counts for the first
            reports.append(compress_job(job))
            run.begin_next()
        return reports


def refuse_ahead(configs: Sequence[Config], *, plans: bool = True) -> None:
    """Raise what is known without weights before they are fetched, or a GGUF file is converted; nothing is shown.

    A local folder of weights is looked at soon enough by the run itself. `plans`: whether results are asked for.
    """
    first = configs[0]
    if os.path.isdir(os.path.expanduser(first.checkpoint)):
        return
    with unheard(), torch.inference_mode():
        try:
            source = open_headers(first.checkpoint, Path(), first.revision)
        except CheckpointError:  # opening the run tells of it, or finds the model in the hub's cache
            return
        run = _run_on_headers(_largest(configs), source, [output_folder(config.output) for config in configs])
        if plans:
            for config in configs:
                _planned_on_headers(config, run, dry=False)
        else:
            run.check_text()


def _largest(configs: Sequence[Config]) -> Config:
    """Return the config with the largest target, which decides whether a model needs further tensors."""
    return max(configs, key=lambda one: one.target.sparsity or 0)


def _run_on_headers(config: Config, source: Checkpoint, outputs: Sequence[Path] = ()) -> Run:
    """Return a run that reads no weights, if there is enough memory for the conversion of a GGUF file."""
    run = Run(config, Path(), outputs, source=source)
    if run.gguf is not None:
        bounds = current_bounds(config.machine, run.machine.device)
        refuse_conversion(config.checkpoint, run.gguf, config.machine, bounds)
    return run


def _planned_on_headers(config: Config, run: Run, *, dry: bool) -> Job:
    """Return a job whose weights cannot be read, so that a budget of seconds is taken as one of FLOPs."""
    refuse_idle(run.grid, run.method, config)
    is_timed = config.target.budget == "latency"
    return Job(config, run, target=replace(config.target, budget="flops") if is_timed else config.target, dry=dry)


def compress_job(job: Job) -> Report:
    """Make one result of a run, step by step, and return its report."""
    run = job.run
    # 1. the memory that the run may take; a model that its description does not fit is refused
    run.use_memory(job.footprint)
    run.check_family()
    # 2. a result that an earlier run finished is left as it is
    finished = job.finished_report()
    if finished is not None:
        return finished
    # 3. the journal, which keeps all work from here on
    with job.journal() as journal:
        run.watch.lap("prepare")
        # 4. the sizes, by a profile or the subspaces of a smaller hidden size, and with them the place of every tensor
        types = None
        if job.schedule.prices_types and journal.saved("plan") is None:
            types = _types_of_original(job)
        decide_sizes(job, journal, types)
        expect_parts(job, journal)
        # 5. the layers, one at a time: measure, select, correct, fold
        layers = compress_layers(job, journal)
        run.watch.lap("layers")
        # 6. embedding, last norm and head
        write_outside(job, journal)
        # 7. the files beside the weights, and the report; then the folder gets its name
        report = write_result(job, journal, layers) if run.machine.workers.is_main else None
        journal.commit()
        report = run.machine.workers.share(0, lambda: report)
    assert report is not None
    return report


def _types_of_original(job: Job) -> OriginalTypes | None:
    """Return what types cost the original's tensors, by a file of it in the scratch folder; None but in one process."""
    run, folder = job.run, job.run.machine.scratch / "original"
    _ = run.text  # whose reading is a stage of its own
    run.tracker.enter(TYPES)
    with run.silent():
        original = Job(job.config_of_original(folder), run)
        original.schedule = replace(original.schedule, measures_importance=False)  # which is read below
        compress_job(original)
    run.use_memory(job.footprint)
    text, layers = run.text.first(IMPORTANCE_TOKENS), run.model.shape.num_hidden_layers
    types = None
    if run.machine.workers.is_main:
        bar = ProgressBar(run.tracker, num_layers=layers, total=text.num_tokens, stage=TYPES)
        rounds = partial(run.tracker.step, "rounding tensors to every type")
        types = price_original(folder, text, run.machine, job.config.seed, advance=bar.advance, rounds=rounds)
        shutil.rmtree(folder)
    run.watch.lap("types")
    return types


def configs_of(config: Config, sparsities: Sequence[float]) -> list[Config]:
    """Return the config of every sparsity, whose output is `OUT/sparsity-0.10` and so on.

    Raises `ConfigError` if two have the same output.
    """
    targets = [replace(config.target, sparsity=sparsity) for sparsity in sparsities]  # which checks the values
    configs = [
        replace(config, target=target, output=str(Path(config.output) / f"sparsity-{target.sparsity:.2f}"))
        for target in targets
    ]
    if len({one.output for one in configs}) < len(configs):
        raise ConfigError("Two of the --sparsity values are equal to two decimals; give each once.")
    return configs


def predict(config: Config) -> Footprint:
    """Return what `compress` would take: a bound of its memory, its disk, its parameters, and roughly its time.

    It reads headers only, no weights and no text, and writes nothing. The plan has equal layers; a profile may
    distribute the same parameters otherwise, which the bound covers. A latency budget is taken as one of FLOPs, because
    measuring a layer needs its weights.

    Raises as `compress` for everything that is known before the first weight is read, but an output that is in the way
    is a warning.
    """
    offload_folder(config.machine)
    with torch.inference_mode():
        source = open_headers(config.checkpoint, Path(), config.revision)
        gguf = source if isinstance(source, GgufCheckpoint) else None
        config = with_kept_dtype(config, gguf)
        run = _run_on_headers(config, source)
        job = _planned_on_headers(config, run, dry=True)
        if config.target.max_loss is not None or config.target.finds_share:
            logger.warning(
                "The size is known after the profile; until then the smallest step stands for it, which needs the most."
            )
        if job.schedule.reads_text:
            run.warn_of_text()
        if not job.schedule.plans_by_profile:
            tell_of_missed_target(job)
        return with_conversion(job.footprint, gguf)


def profile(config: Config, *, show_progress: Shown | Tracker = False) -> Profile:
    """Profile the model and save it to `config.output`, for later plans. Raises as `compress`."""
    output = output_folder(config.output)
    refuse_existing(output)
    refuse_unwritable(output)
    if not config.target.asks_less:  # its form, method and text are of the runs that will plan from it
        config = replace(config, target=replace(config.target, sparsity=PLANNED_SHARE))
    refuse_ahead([config], plans=False)
    with open_run(config, show_progress=show_progress) as run:
        schedule = profile_schedule(run.grid, run.method)
        _begin_measuring(run, schedule)
        measured = run.make_profile(schedule)
        for sentence in gram_sentences(
            run.machine.workers.gather(run.warnings.notes_of_all + run.warnings.take_notes()), []
        ):
            logger.warning("%s", sentence)
        if run.machine.workers.is_main:
            curvature = run.curvature if schedule.weighs_output else None
            beside = _of_mixture(run, measured)
            save_profile(measured, output, written=run.saved_text, curvature=curvature, beside=beside)
        return measured


def _of_mixture(run: Run, measured: Profile) -> dict[str, str]:
    """Return the files that a profile of a mixture has for people and servers, by name; none of other models."""
    verdict, lines = mixture_verdict(run.grid, measured), ranking_lines(measured)
    files = {} if verdict is None else {VERDICT: json_text(verdict_record(verdict)) + "\n"}
    return files | ({RANKING: "\n".join(lines) + "\n"} if lines else {})


def imatrix(config: Config, *, show_progress: Shown | Tracker = False) -> Path:
    """Write llama.cpp's importance matrix of the dense model to `config.output`, and return its path.

    Raises as `compress`, and `CheckpointError` for families that llama.cpp does not know.
    """
    path = output_folder(config.output)
    refuse_file(path, paths_read(config), overwrite=config.overwrite)
    refuse_ahead([config], plans=False)
    with open_run(config, show_progress=show_progress) as run:
        model = run.model
        names = tensor_names(model)  # which refuses a family without an architecture
        _begin_measuring(run, Schedule(measures_importance=True))
        config_of_model = complete_text_config(model.family, model.checkpoint.config)
        text, layers = run.text, model.shape.num_hidden_layers
        progress = ProgressBar(run.tracker, num_layers=layers, total=text.num_tokens, stage="importance")
        squares = measure_importance(model, text, run.machine, advance=progress.advance)
        if run.machine.workers.is_main:
            try:
                write_imatrix(path, squares, names, text, config_of_model)
            except OSError as error:
                raise OutputError(f"{path} cannot be written ({cause(error)}); choose another --output.") from error
    return path


def _begin_measuring(run: Run, schedule: Schedule) -> None:
    """Refuse what the dense model cannot be measured with, and say how long its stages will take."""
    run.check_text()
    footprint = footprint_of(run, run.config, schedule, None)
    run.use_memory(footprint)
    run.tracker.expect(list(stages_of(run, run.config, schedule, None, footprint).items()))
    run.check_family()
