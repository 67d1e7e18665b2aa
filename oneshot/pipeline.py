"""The order of the stages: open, plan, read text, profile, find subspaces, compress layers, export."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from oneshot.checkpoint import (
    GgufCheckpoint,
    complete_text_config,
    open_gguf,
    open_headers,
    output_folder,
    refuse_file,
    refuse_unwritable,
)
from oneshot.config import Config
from oneshot.errors import ConfigError, OutputError, cause
from oneshot.export import tensor_names, with_kept_dtype, write_imatrix
from oneshot.footprint import current_bounds, offload_folder, refuse_conversion, with_conversion
from oneshot.job import (
    Job,
    compress_layers,
    decide_sizes,
    expect_parts,
    expect_stages,
    tell_of_missed_target,
    write_outside,
    write_result,
)
from oneshot.machine.memory import reset_peak
from oneshot.planning import Profile
from oneshot.profiling import measure_importance, refuse_existing, save_profile
from oneshot.report.card import REPORT_NAME
from oneshot.report.grams import gram_sentences
from oneshot.report.progress import ProgressBar, Shown, Stopwatch, Tracker, following
from oneshot.report.records import Footprint, Report
from oneshot.run import Run, open_run
from oneshot.schedule import Schedule, profile_schedule

logger = logging.getLogger(__name__)
Check = Callable[[Config, Report], Report]  # measures a result beside its original, and adds that to its report
TOO_CAREFUL = 0.5  # of the allowed loss, below which a size is corrected, too


def compress(config: Config, *, show_progress: Shown | Tracker = False) -> Report:
    """Compress a checkpoint into `config.output` and return the report that is also written there.

    Nothing appears at the output before it is complete. The same seed, machine and thread count give the same bytes,
    also if a run was interrupted and another continued with `config.resume`.

    Raises a subclass of `OneshotError` with one sentence for everything that a user can mend.
    """
    if config.target.max_loss is not None:
        raise ConfigError("--max-loss is judged by a check at the end, which this run leaves out; ask for a size.")
    watch = Stopwatch()
    config = with_kept_dtype(config, open_gguf(config.checkpoint))
    with _opened(config, [config], show_progress) as run:
        return _compress_alone(config, run, watch)


def compress_sizes(
    config: Config, sparsities: Sequence[float], *, show_progress: Shown | Tracker = False
) -> list[Report]:
    """Compress once for every sparsity, into `OUT/sparsity-0.10` and so on; text and profile are shared.

    All targets are planned before the first run, so that one out of reach is refused before any work.
    """
    configs = configs_of(with_kept_dtype(config, open_gguf(config.checkpoint)), sparsities)
    watch = Stopwatch()
    # the largest target decides whether a model needs further tensors
    largest = max(configs, key=lambda one: one.target.sparsity or 0)
    with _opened(largest, configs, show_progress) as run:
        jobs = [Job(one, run) for one in configs]
        expect_stages(jobs)
        reports = []
        for job in jobs:  # what all share counts for the first
            reports.append(_compress(job, watch))
            watch = Stopwatch()
            reset_peak()
        return reports


def compress_within(config: Config, check: Check, *, show_progress: Shown | Tracker = False) -> Report:
    """Compress to the smallest size whose perplexity rises by `config.target.max_loss` at most, and return its report.

    The profile of the run predicts the size. If the check then finds more loss, or less than half of it, the size is
    planned once more by what was measured, and replaces the first. Otherwise as `compress`.
    """
    watch = Stopwatch()
    config = with_kept_dtype(config, open_gguf(config.checkpoint))
    with _opened(config, [config], show_progress) as run:

        def checked(config: Config, watch: Stopwatch) -> Report:
            report = _compress_alone(config, run, watch)
            return run.machine.workers.share(0, lambda: report if report.check is not None else check(config, report))

        if config.resume:
            config = _finished_of(config, run)
        report = checked(config, watch)
        corrected = _corrected(config, report)
        if corrected is not None:
            reset_peak()
            report = checked(corrected, Stopwatch())
        lost, allowed = _lost(report), config.target.max_loss
        if lost is not None and allowed is not None and lost > math.log1p(allowed):
            logger.warning(
                "The perplexity rose by %.1f %% where %.1f %% was allowed; ask for a smaller --max-loss.",
                100 * math.expm1(lost),
                100 * allowed,
            )
        return report


@contextmanager
def _opened(config: Config, configs: Sequence[Config], show_progress: Shown | Tracker) -> Iterator[Run]:
    """Open the run of a config, which writes the results of `configs`, and show how far it is."""
    outputs = [output_folder(one.output) for one in configs]
    with following(show_progress) as tracker, open_run(config, outputs, tracker=tracker) as run:
        yield run


def _compress_alone(config: Config, run: Run, watch: Stopwatch) -> Report:
    """Compress the only target that a run has now; `watch` as in `_compress`."""
    job = Job(config, run)
    expect_stages([job])
    return _compress(job, watch)


def _lost(report: Report) -> float | None:
    """Return the nats that the check of a result found lost; None if it could not be made."""
    return None if report.check is None else report.check.lost_nats


def _corrected(config: Config, report: Report) -> Config | None:
    """Return the config of a second plan by what the first one's check has measured; None if there is no need."""
    assert config.target.max_loss is not None
    lost, allowed = _lost(report), math.log1p(config.target.max_loss)
    if lost is None:
        reason = report.check.skipped if report.check is not None else ""
        logger.warning("--max-loss could not be judged, so the size is the predicted one. %s", reason)
        return None
    predicted = (report.predicted_divergence or {}).get("plan", 0.0)
    if config.target.loss_scale is not None or predicted <= 0 or TOO_CAREFUL * allowed <= lost <= allowed:
        return None
    scale = max(lost, TOO_CAREFUL / 2 * allowed) / predicted
    logger.warning(
        "The perplexity rose by %.1f %% where %.1f %% is allowed: the size is planned once more by what was measured.",
        100 * math.expm1(lost),
        100 * config.target.max_loss,
    )
    return replace(config, target=replace(config.target, loss_scale=scale), overwrite=True)


def _finished_of(config: Config, run: Run) -> Config:
    """Return the config with the scale that this run has measured, if its second result is finished."""
    scale = _scale_of(config)
    if scale is None:
        return config
    measured = replace(config, target=replace(config.target, loss_scale=scale))
    job = Job(measured, run)
    run.use_memory(job.footprint)
    run.check_family()
    return config if job.finished_report() is None else measured


def _scale_of(config: Config) -> float | None:
    """Return the measured scale of a finished result of the same target, perhaps of other options."""
    try:
        target = json.loads((output_folder(config.output) / REPORT_NAME).read_bytes())["config"]["target"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the job says what is wrong with the output
    scale = target.get("loss_scale") if isinstance(target, dict) else None
    same = isinstance(scale, float) and target.get("max_loss") == config.target.max_loss
    return scale if same else None


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
        run = Run(config, Path(), source=source)
        if gguf is not None:
            bounds = current_bounds(config.machine, run.machine.device)
            refuse_conversion(config.checkpoint, gguf, config.machine, bounds)
        target = config.target
        if target.budget == "latency":
            target = replace(target, budget="flops")
        job = Job(config, run, target=target, dry=True)
        if target.max_loss is not None:
            logger.warning(
                "The size is known after the profile; until then the smallest step stands for it, which needs the most."
            )
        if job.schedule.reads_text:
            run.warn_of_text()
        if not job.schedule.plans_by_profile:
            tell_of_missed_target(job, job.plan)
        return with_conversion(job.footprint, gguf)


def profile(config: Config, *, show_progress: Shown | Tracker = False) -> Profile:
    """Profile the model and save it to `config.output`, for later plans. Raises as `compress`."""
    output = output_folder(config.output)
    refuse_existing(output)
    refuse_unwritable(output)
    with following(show_progress) as tracker, open_run(config, tracker=tracker) as run:
        schedule = profile_schedule(run.grid, run.method)
        _begin_measuring(config, run, schedule, tracker)
        measured = run.make_profile(schedule)
        for sentence in gram_sentences(
            run.machine.workers.gather(run.warnings.notes_of_all + run.warnings.take_notes()), []
        ):
            logger.warning("%s", sentence)
        if run.machine.workers.is_main:
            save_profile(measured, output, written=run.saved_text)
        return measured


def imatrix(config: Config, *, show_progress: Shown | Tracker = False) -> Path:
    """Write llama.cpp's importance matrix of the dense model to `config.output`, and return its path.

    Raises as `compress`, and `CheckpointError` for families that llama.cpp does not know.
    """
    path = output_folder(config.output)
    refuse_file(path, overwrite=config.overwrite)
    with following(show_progress) as tracker, open_run(config, tracker=tracker) as run:
        model = run.model
        names = tensor_names(model)  # which refuses a family without an architecture
        _begin_measuring(config, run, Schedule(measures_importance=True), tracker)
        config_of_model = complete_text_config(model.family, model.checkpoint.config)
        text, layers = run.text, model.shape.num_hidden_layers
        with ProgressBar(run.tracker, num_layers=layers, total=text.num_tokens, stage="importance") as progress:
            squares = measure_importance(model, text, run.machine, advance=progress.advance)
        if run.machine.workers.is_main:
            try:
                write_imatrix(path, squares, names, config.text, config_of_model)
            except OSError as error:
                raise OutputError(f"{path} cannot be written ({cause(error)}); choose another --output.") from error
    return path


def _begin_measuring(config: Config, run: Run, schedule: Schedule, tracker: Tracker) -> None:
    """Refuse what the dense model cannot be measured with, and say how long its stages will take."""
    run.check_text()
    footprint = run.footprint(config, schedule, None)
    run.use_memory(footprint)
    tracker.expect(list(run.stage_seconds(config, schedule, None, footprint).items()))
    run.check_family()


def _compress(job: Job, watch: Stopwatch) -> Report:
    """Compress one target of a run. `watch` has the seconds since the target began."""
    run = job.run
    run.use_memory(job.footprint)
    run.check_family()
    finished = job.finished_report()
    if finished is not None:
        return finished
    with job.journal() as journal:
        job.save_shared(journal)
        watch.lap("prepare")
        sizes = decide_sizes(job, journal, watch)
        expect_parts(job, sizes, journal)
        layers = compress_layers(job, sizes, journal, watch)
        watch.lap("layers")
        write_outside(job, sizes, journal, layers)
        report = write_result(job, sizes, journal, layers, watch) if run.machine.workers.is_main else None
        journal.commit()
        report = run.machine.workers.share(0, lambda: report)
    assert report is not None
    return report
