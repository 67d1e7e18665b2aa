"""The final sizes of a job, which a profile or the subspaces of a smaller hidden size may decide."""

import logging
import math
from dataclasses import asdict, replace

from oneshot.checkpoint import Journal
from oneshot.compression import StreamSubspaces, TokenRows, find_subspaces, reduce_embedding
from oneshot.config import Target
from oneshot.export import FORMS, OriginalTypes, form_of
from oneshot.job.job import Job
from oneshot.json_text import numbers
from oneshot.machine.memory import release_heap
from oneshot.planning import (
    Damages,
    Grid,
    Plan,
    beside_rounding,
    make_plan,
    missed_target,
    mixture_verdict,
    predicted_curve,
    predicted_divergences,
    profiled_damages,
    spread_hidden_sizes,
    within_loss,
)
from oneshot.profiling import marks_of
from oneshot.report.mixture import verdict_record
from oneshot.report.progress import ProgressBar
from oneshot.run import budget_of, grid_of
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)
RANKED_TABLES = "tables"  # the journal's name for tables of the vocabulary with ranks


def decide_sizes(job: Job, journal: Journal, types: OriginalTypes | None = None) -> None:
    """Measure what the schedule says, and settle the sizes of the job. An interrupted run finds them in the journal.

    What was measured is saved: a profile takes long, and latencies would differ the next time.

    Args:
        types: what types cost the original, if the share that goes is chosen beside them; in the main process.
    """
    run, schedule, saved = job.run, job.schedule, journal.saved("plan")
    if schedule.measures_curvature and not (schedule.plans_by_profile and saved is not None):
        _ = run.curvature  # which a profile reads
        run.watch.lap("curvature")
    if saved is not None:
        job.plan = Plan.from_dict(saved["plan"])
        job.divergences, job.curve = (
            None if one is None else numbers(one) for one in (saved["divergences"], saved["curve"])
        )
        job.mixture = saved["mixture"]
    else:
        if schedule.plans_by_profile:
            _plan_by_profile(job, journal, types)
        if schedule.plans_by_profile or job.config.target.budget == "latency":
            plan = {"plan": asdict(job.plan), "divergences": job.divergences, "curve": job.curve}
            plan["mixture"] = job.mixture
            journal.save("plan", plan)
    if schedule.plans_by_profile:
        run.watch.lap("profile")
    if run.grid.stack(job.plan) == run.grid.dense and run.quantisation is None:  # nothing is there to correct
        job.schedule = replace(schedule, streams=0, weighs_output=False)
    if job.plan.hidden is not None:
        _find_subspaces(job)
    if run.machine.workers.is_main:
        tell_of_missed_target(job)
    if schedule.finds_subspaces:
        run.watch.lap("hidden size")
    job.tables = journal.saved_tensors(RANKED_TABLES) or {} if job.plan.tables else {}
    job.warnings = run.warnings.take()
    job.gram_notes = run.machine.workers.gather(run.warnings.notes_of_all + run.warnings.take_notes())


def tell_of_missed_target(job: Job) -> None:
    """Warn if a plan removes clearly more or less than was asked for."""
    target = job.config.target
    if target.max_loss is not None or target.finds_share or not target.asks_less:  # no share was asked for
        return
    grid, budget = job.run.grid, job.budget
    sentence = missed_target(budget, budget.measure(grid.dense), budget.measure(grid.stack(job.plan)))
    if sentence is not None:
        logger.warning("%s", sentence)


def _plan_by_profile(job: Job, journal: Journal, types: OriginalTypes | None) -> None:
    """Plan from a profile, and predict divergences. Tables at their ranks, which need the profile, are saved."""
    run, target, budget = job.run, job.config.target, job.budget
    measured = run.profile(job.schedule)
    run.tracker.enter("planning the sizes of the layers")
    share = run.machine.workers.share
    damages = profiled_damages(measured, run.method.allocation, run.grid)
    sensitivity = profiled_damages(measured, "sensitivity", run.grid)
    if target.max_loss is not None:
        asked = target
        target = share(0, lambda: within_loss(run.grid, run.method, asked, damages, sensitivity))
        budget = budget_of(run, target)
    if target.finds_share:
        target = share(0, lambda: _share_beside_types(job, types, damages, sensitivity))
        budget = budget_of(run, target)
    job.plan = plan = share(0, lambda: make_plan(run.grid, run.method, target, damages, budget))
    job.refuse_unserved()
    grids: dict[str, Grid] = {name: grid_of(form_of(name, run.model.family), run.model, run.config) for name in FORMS}
    job.divergences = predicted_divergences(grids, job.config.method, target, plan, measured, budget) or None
    verdict = mixture_verdict(run.grid, measured)
    job.mixture = None if verdict is None else verdict_record(verdict)
    job.curve = share(0, lambda: predicted_curve(run.grid, run.method, target, sensitivity))
    reduced, device, workers = Tensors(), run.machine.device, run.machine.workers
    marks = marks_of(run.model) if plan.tables else []
    for table, ranges in plan.tables.items():
        run.tracker.step(f"reducing the {table.replace('_', ' ')}", brief=True)
        evidence = measured.of_table(table, "gram").to(device), measured.token_probabilities.to(device)
        rows = TokenRows(run.model.read_table(table), *evidence, marks, table)
        reduced |= reduce_embedding(rows, measured.of_table(table, "order"), ranges, workers=workers)
    if reduced and workers.is_main:
        journal.save_tensors(RANKED_TABLES, reduced)
    release_heap()  # of the profile and of the planner's solver


def _share_beside_types(job: Job, types: OriginalTypes | None, damages: Damages, sensitivity: Damages) -> Target:
    """Return the target of the share that goes beside quantised types, and tell what both are predicted to cost."""
    run, target = job.run, job.config.target
    assert types is not None
    assert target.gguf_bytes is not None
    file_bytes = target.gguf_bytes

    def rounding(plan: Plan) -> float:
        return types.loss_of(plan, run.grid.stack(plan), file_bytes)

    found = beside_rounding(run.grid, run.method, target, damages, sensitivity, rounding)
    alone = f"would lose {found.rounding_alone:.3f}" if math.isfinite(found.rounding_alone) else "would not fit"
    sentence = f"All parameters stay: their types are predicted to lose {found.rounding:.3f} nats a token."
    if found.target.sparsity:
        sentence = (
            f"{found.target.sparsity:.1%} of the parameters go, predicted to lose {found.removal:.3f} nats a token, "
            f"and the types of what stays {found.rounding:.3f}; with all parameters they {alone}."
        )
    run.tracker.say(sentence)
    return found.target


def _find_subspaces(job: Job) -> None:
    """Find the subspaces of a smaller hidden size, and the widths that suit them."""
    plan, run, method, target = job.plan, job.run, job.run.method, job.config.target
    assert plan.hidden is not None
    progress = ProgressBar(
        run.tracker, num_layers=run.model.shape.num_hidden_layers, total=run.text.num_tokens, stage="hidden size"
    )
    subspaces = find_subspaces(
        run.model,
        run.text,
        plan.hidden.group_of,
        run.machine,
        token_weighting=method.token_weighting,
        shared_weight=method.shared_weight,
        advance=progress.advance,
    )
    if method.allocation == "error" and not target.states_hidden_size and plan.hidden.num_groups > 1:
        plan = spread_hidden_sizes(run.grid, plan, subspaces.energies, budget=job.budget, round_to=target.round_to)
    assert plan.hidden is not None
    job.plan, job.subspaces = plan, StreamSubspaces(subspaces, plan.hidden, run.machine.device)
