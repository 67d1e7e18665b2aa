"""The smallest size whose loss is allowed: predicted, checked, and if need be planned again by what was measured."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from oneshot.checkpoint import open_gguf, output_folder
from oneshot.config import Config
from oneshot.export import with_kept_dtype
from oneshot.job import Job, plan_jobs
from oneshot.pipeline import compress_job, refuse_ahead
from oneshot.report.progress import Shown, Tracker
from oneshot.report.records import Report
from oneshot.run import Run, open_run, reported

logger = logging.getLogger(__name__)
Check = Callable[[Config, Report], Report]  # measures a result beside its original, and adds that to its report
TOO_CAREFUL = 0.5  # of the allowed loss, below which a size is also corrected


def compress_within(config: Config, check: Check, *, show_progress: Shown | Tracker = False) -> Report:
    """Compress to the smallest size whose perplexity rises by `config.target.max_loss` at most, and return its report.

    The profile of the run predicts the size. If the check then finds more loss, or less than half of it, the size is
    planned once more by what was measured, and replaces the first. Otherwise as `pipeline.compress`.
    """
    config = with_kept_dtype(config, open_gguf(config.checkpoint))
    refuse_ahead([config])
    with open_run(config, [output_folder(config.output)], show_progress) as run:

        def checked(config: Config) -> Report:
            [job] = plan_jobs([config], run)
            report = compress_job(job)
            return run.machine.workers.share(0, lambda: report if report.check is not None else check(config, report))

        if config.resume:
            config = _finished_of(config, run)
        report = checked(config)
        corrected = _corrected(config, report)
        if corrected is not None:
            run.begin_next()
            report = checked(corrected)
        if (sentence := report.unmet_limit) is not None:
            logger.warning("%s", sentence)
        return report


def _corrected(config: Config, report: Report) -> Config | None:
    """Return the config of a second plan by what the first one's check has measured; None if there is no need."""
    assert config.target.max_loss is not None
    lost = None if report.check is None else report.check.lost_nats
    allowed = math.log1p(config.target.max_loss)
    predicted = (report.predicted_divergence or {}).get("plan", 0.0)
    if (
        lost is None
        or config.target.loss_scale is not None
        or predicted <= 0
        or TOO_CAREFUL * allowed <= lost <= allowed
    ):
        return None
    scale = max(lost, TOO_CAREFUL / 2 * allowed) / predicted
    logger.warning(
        "The perplexity changed by %+.1f %% where %.3g %% is allowed: the size is planned again by what was measured.",
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
    target = (reported(output_folder(config.output), "config") or {}).get("target")  # the job says if it is damaged
    if not isinstance(target, dict) or target.get("max_loss") != config.target.max_loss:
        return None
    scale = target.get("loss_scale")
    return scale if isinstance(scale, float) else None
