"""The final sizes of a job, which a profile or the subspaces of a smaller hidden size may decide."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from oneshot.checkpoint import Journal
from oneshot.compression import StreamSubspaces, find_subspaces, reduce_embedding
from oneshot.export import FORMS, form_of
from oneshot.job.job import Job
from oneshot.json_text import numbers
from oneshot.linalg.psd import GramNote
from oneshot.machine.memory import release_heap
from oneshot.planning import (
    Grid,
    Plan,
    make_plan,
    missed_target,
    predicted_curve,
    predicted_divergences,
    profiled_damages,
    spread_hidden_sizes,
    within_loss,
)
from oneshot.report.progress import ProgressBar, Stopwatch
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)
EMBEDDING = "embedding"  # the journal's name for a reduced embedding


@dataclass(frozen=True)
class JobSizes:
    """The final sizes, and what was measured to decide them.

    Attributes:
        divergences: the predicted divergence of each form; None without a profile. curve: of other sizes.
        subspaces: the stream's, if the hidden size shrinks. embedding: tensors of a reduced embedding.
        warnings, gram_notes: remarks of the measurements; notes on Grams are of all processes.
    """

    plan: Plan
    divergences: dict[str, float] | None = None
    curve: dict[str, float] | None = None
    subspaces: StreamSubspaces | None = None
    embedding: Tensors | None = None
    warnings: tuple[str, ...] = ()
    gram_notes: Sequence[GramNote] = ()


def decide_sizes(job: Job, journal: Journal, watch: Stopwatch) -> JobSizes:
    """Measure what the schedule says, and return the final sizes. An interrupted run finds them in the journal."""
    schedule, is_saved = job.schedule, journal.saved("plan") is not None
    if schedule.measures_curvature and not (schedule.plans_by_profile and is_saved):
        _ = job.run.curvature  # which a profile reads
        watch.lap("curvature")
    sizes = _measured(job, journal)
    if schedule.plans_by_profile:
        watch.lap("profile")
    sizes = _with_subspaces(job, sizes)
    if job.run.machine.workers.is_main:
        tell_of_missed_target(job, sizes.plan)
    if schedule.finds_subspaces:
        watch.lap("hidden size")
    return replace(
        sizes,
        embedding=journal.saved_tensors(EMBEDDING) if sizes.plan.embedding else None,
        warnings=job.run.warnings.take(),
        gram_notes=job.run.machine.workers.gather(job.run.warnings.notes_of_all + job.run.warnings.take_notes()),
    )


def tell_of_missed_target(job: Job, plan: Plan) -> None:
    """Warn if a plan removes clearly more or less than was asked for."""
    if job.config.target.max_loss is not None:  # no size was asked for
        return
    grid, budget = job.run.grid, job.budget
    sentence = missed_target(budget, budget.measure(grid.dense), budget.measure(grid.stack(plan)))
    if sentence is not None:
        logger.warning("%s", sentence)


def _measured(job: Job, journal: Journal) -> JobSizes:
    """Return the plan made from a profile, if the schedule has one, and the divergences that the profile predicts.

    What was measured is saved: a profile takes long, and latencies would differ the next time. The embedding at its
    planned ranks is also saved, because it needs the profile.
    """
    saved = journal.saved("plan")
    if saved is not None:
        of_forms, of_sizes = (None if one is None else numbers(one) for one in (saved["divergences"], saved["curve"]))
        return JobSizes(Plan.from_dict(saved["plan"]), of_forms, of_sizes)
    sizes = _profiled(job, journal) if job.schedule.plans_by_profile else JobSizes(job.plan)
    if job.schedule.plans_by_profile or job.config.target.budget == "latency":
        saved = {"plan": asdict(sizes.plan), "divergences": sizes.divergences, "curve": sizes.curve}
        journal.save("plan", saved)
    return sizes


def _profiled(job: Job, journal: Journal) -> JobSizes:
    run, config = job.run, job.config
    measured = run.profile(job.schedule)
    run.tracker.enter("planning the sizes of the layers")
    damages, target, budget = profiled_damages(measured, run.method.allocation, run.grid), config.target, job.budget
    sensitivity = profiled_damages(measured, "sensitivity", run.grid)
    if target.max_loss is not None:
        asked = target
        target = run.machine.workers.share(0, lambda: within_loss(run.grid, run.method, asked, damages, sensitivity))
        budget = run.budget(target)
    plan = run.machine.workers.share(0, lambda: make_plan(run.grid, run.method, target, damages, budget))
    job.refuse_unserved(plan)
    grids: dict[str, Grid] = {name: run.grid_of(form_of(name, run.model.family)) for name in FORMS}
    divergences = predicted_divergences(grids, config.method, target, plan, measured, budget)
    curve = run.machine.workers.share(0, lambda: predicted_curve(run.grid, run.method, target, sensitivity))
    if plan.embedding and run.machine.workers.is_main:
        run.tracker.step("reducing the embedding", brief=True)
        device = run.machine.device
        evidence = measured.embedding_gram.to(device), measured.embedding_probabilities.to(device)
        journal.save_tensors(EMBEDDING, reduce_embedding(run.model.read_embedding(), *evidence, plan.embedding))
    release_heap()  # of the profile and of the planner's solver
    return JobSizes(plan, divergences, curve)


def _with_subspaces(job: Job, sizes: JobSizes) -> JobSizes:
    """Return the subspaces of a smaller hidden size, and the plan with the widths that suit them."""
    plan, run, method, target = sizes.plan, job.run, job.run.method, job.config.target
    if plan.hidden is None:
        return sizes
    with ProgressBar(
        run.tracker,
        num_layers=run.model.shape.num_hidden_layers,
        total=run.text.num_tokens,
        stage="hidden size",
    ) as progress:
        subspaces = find_subspaces(
            run.model,
            run.text,
            plan.hidden.group_of,
            run.machine,
            token_weighting=method.token_weighting,
            shared_weight=method.shared_weight,
            kind=method.hidden,
            seed=job.config.seed,
            advance=progress.advance,
        )
    if method.allocation == "error" and not target.states_hidden_size and plan.hidden.num_groups > 1:
        plan = spread_hidden_sizes(run.grid, plan, subspaces.energies, budget=job.budget, round_to=target.round_to)
    assert plan.hidden is not None
    return replace(sizes, plan=plan, subspaces=StreamSubspaces(subspaces, plan.hidden, run.machine.device))
