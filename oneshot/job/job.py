"""One result of a run: its plan, its stages, and what they take, all known before any work."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from oneshot.checkpoint import Journal, output_folder, refuse_output, refuse_place, remove_leftovers
from oneshot.compression import StreamSubspaces
from oneshot.config import Config, FormName, Target, TextOptions
from oneshot.errors import ConfigError, OutputError, PlanError, cause
from oneshot.export import FurtherResult
from oneshot.export.quantisers import refuse_without_quantisers
from oneshot.export.served import reason_against_result, width_step_in
from oneshot.export.tensor_types import refuse_impossible
from oneshot.footprint import TYPES, offload_folder
from oneshot.linalg.psd import GramNote
from oneshot.machine.durable import seal
from oneshot.planning import (
    LEAST_SHARE,
    MANY_NEURONS,
    MEASURED_SHARE,
    Plan,
    expected_of_equal_layers,
    expected_of_own_sizes,
    least_share,
    make_plan,
    profiled_damages,
    quantiser_groups,
    refuse_idle,
    removed_neurons,
    with_share,
    with_steps,
)
from oneshot.profiling import load_profile
from oneshot.report.card import REPORT_NAME
from oneshot.report.records import Footprint, Report
from oneshot.report.sharing import told_sources
from oneshot.run import (
    SAVED_TEXT,
    SAVED_TIMINGS,
    Run,
    better_form,
    budget_of,
    file_bytes,
    footprint_of,
    grid_of,
    paths_read,
    plans_by_profile,
    stages_of,
)
from oneshot.schedule import Schedule, make_schedule
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)
# of several results
SHARED_STAGES = ("reading", "writing text", TYPES, "curvature", "profile", "ranks of the embedding")


class Job:
    """One result of a run.

    Attributes:
        plan: the sizes; until `decide_sizes` those that are planned without a profile.
        schedule: the stages. budget: the bound of the sizes.
        footprint: the predicted memory, disk and, in a dry run, time.
        divergences: which the profile predicts of each form; None without one. curve: of other sizes.
            mixture: the profile's verdict on one (`report.mixture`); None without it.
        subspaces: the stream's, if the hidden size shrinks. tables: ranges of the vocabulary that replace tables of
            the model.
        warnings, gram_notes: remarks of the measurements; notes on Grams are of all processes.

    Args:
        config: with the result's output; the job's own has the settled form.
        target: replaces the config's for the plan; None keeps it.
        dry: whether seconds are predicted, for which the machine is timed.

    Raises `OneshotError` for everything that is known before the first weight is read; a dry run only warns that the
    output is in the way.
    """

    divergences: dict[str, float] | None = None
    curve: dict[str, float] | None = None
    mixture: dict[str, Any] | None = None
    subspaces: StreamSubspaces | None = None
    warnings: tuple[str, ...] = ()
    gram_notes: Sequence[GramNote] = ()

    def __init__(self, config: Config, run: Run, *, target: Target | None = None, dry: bool = False) -> None:
        self.tables: Tensors = {}
        # 1. where the result goes
        step = width_step_in(config.target.serving.engine, run.form)
        served = with_steps(run.grouped(config.target), run.model.shape, step)
        config = replace(config, form=cast(FormName, run.form.name), target=served)
        self.config, self.run, self.output = config, run, output_folder(config.output)
        try:
            refuse_place(self.output, self._paths_read(), overwrite=config.overwrite, resume=config.resume)
        except OutputError as error:
            if not dry:
                raise
            logger.warning("%s", error)  # what a run would take is known all the same
        # 2. its sizes, without a profile
        wanted = config.target if target is None else with_steps(run.grouped(target), run.model.shape, step)
        if wanted.max_loss is not None or wanted.finds_share:  # the smallest share stands for what a profile will find
            wanted = with_share(wanted, LEAST_SHARE)
        self.budget = budget_of(run, wanted)
        self.plan = run.machine.workers.share(0, lambda: make_plan(run.grid, run.method, wanted, budget=self.budget))
        removes = run.grid.stack(self.plan) != run.model.shape.stack()
        if removes:
            run.form.config(run.model, self.plan)  # which refuses sizes that it cannot state
            self.refuse_unserved()
        run.further.tell(self.plan)
        # 3. its stages
        asks_less = self.budget.target < self.budget.measure(run.grid.dense)
        self.schedule = self._scheduled(asks_less)
        by_profile = self.schedule.plans_by_profile
        if asks_less and not removes and not by_profile:
            share = least_share(run.grid, run.method, wanted, self.budget)
            advice = "set ffn=id" if share is None else f"ask for --sparsity {share} or more"
            raise PlanError(
                "The sizes that this model can have are so far apart that the whole model is nearest to the target; "
                f"{advice}."
            )
        if config.profile is not None and not by_profile:
            logger.warning(
                "The profile %s is not used, because this run plans nothing from one; --form per-layer does, or leave "
                "--profile out.",
                config.profile,
            )
        elif config.profile is not None:
            run.check_profile()
        self._warn_of_narrow_layers()
        if self.schedule.reads_text:
            run.check_text()
        # 4. what they take
        groups = quantiser_groups(run.grid, run.method, self.plan, wanted, by_profile=by_profile)
        self.footprint: Footprint = replace(
            footprint_of(run, config, self.schedule, self.plan, dry=dry),
            form=config.form,
            groups=str(groups),
            served="" if config.target.serve is None else config.target.serving.words,
            text=f"{run.text_options.num_tokens:,} tokens of {told_sources(run.text_options.calibration)}"
            if self.schedule.reads_text
            else "",
        )
        asked = config.target
        finds_size = asked.max_loss is not None or asked.finds_share or asked.budget == "latency"
        if by_profile and dry and config.profile is not None and not finds_size:
            measured = load_profile(Path(config.profile).expanduser())
            damages = profiled_damages(measured, run.method.allocation, run.grid)
            self._predict_sizes(make_plan(run.grid, run.method, wanted, damages, self.budget), is_final=True)
        elif by_profile and self.budget.unit == "parameters":  # not the parameters of equal layers
            self._predict_sizes(self.plan, is_final=False, parameters=round(self.budget.target))

    def _paths_read(self) -> dict[str, list[Path]]:
        """Return the files and folders that this job needs until its end, by what a sentence calls them."""
        found, scratch = paths_read(self.config), offload_folder(self.config.machine)
        found["the input checkpoint"].append(self.run.model.checkpoint.folder)  # of a hub name
        return found | {f"the off-load folder {scratch}": [scratch]}

    def _predict_sizes(self, plan: Plan, *, is_final: bool, parameters: int | None = None) -> None:
        """Put a plan's parameters, or so many in their place, and their bytes into the footprint."""
        parameters = self.run.grid.stack(plan).stored_parameters() if parameters is None else parameters
        stored = self.footprint.stored_parameters | {"compressed": parameters}
        result_bytes, _ = file_bytes(self.run, self.config, parameters, plan, is_final=is_final)
        self.footprint = replace(self.footprint, stored_parameters=stored, result_bytes=result_bytes)

    def _scheduled(self, asks_less: bool) -> Schedule:
        """Return the stages, which the run hears of; `asks_less`: whether the budget is below the dense model's."""
        config, run = self.config, self.run
        has_profile = config.profile is not None
        schedule = make_schedule(
            run.method,
            self.plan,
            run.grid,
            num_tokens=config.text.num_tokens,
            has_profile=has_profile,
            has_curvature=run.has_curvature,
            asks_less=asks_less,
            quantises=config.quantise is not None,
        )
        if config.quantises:
            if config.target.keep:
                raise ConfigError(
                    "--keep does not go together with --bits or --max-file-size, because every matrix gets a type that "
                    "rounds it; leave one of them out."
                )
            refuse_without_quantisers()
            refuse_impossible(run.grid.stack(self._smallest() if config.target.finds_share else self.plan), config)
        names_text = config.quantises or config.text.calibration != TextOptions().calibration
        if run.grid.writes_vocabulary and (schedule.fits_text or names_text):  # a GGUF file
            schedule = replace(
                schedule,
                measures_importance=True,
                chooses_types=config.quantises,
                prices_types=config.target.finds_share,
            )
        if not schedule.plans_by_profile:
            if config.target.max_loss is not None:
                remedy = "ask for a size"
                if plans_by_profile(config, run.model, served=False):
                    is_hindered = not plans_by_profile(config, run.model)
                    engine = f"engine={config.target.serving.engine} of --serve, " if is_hindered else ""
                    remedy = f"leave out {engine}--form, --recipe and choices of the method, or {remedy}"
                raise ConfigError(f"--max-loss is planned by a profile, and this run makes none; {remedy}.")
            if config.target.finds_share:
                raise ConfigError(
                    "--max-file-size alone is planned by a profile, and this run makes none; add --sparsity 0, or how "
                    "much is to go."
                )
        run.fits_text |= schedule.fits_text
        run.plans_by_profile |= has_profile and schedule.plans_by_profile
        return schedule

    def _smallest(self) -> Plan:
        """Return the plan of the largest share that layers of equal sizes can lose."""
        run, target, smallest = self.run, self.config.target, self.plan
        for percent in range(1, 100):
            try:
                smallest = make_plan(run.grid, run.method, with_share(target, percent / 100))
            except PlanError:
                break
        return smallest

    def config_of_original(self, folder: Path) -> Config:
        """Return the config of the whole model in this form, in a folder of its own and without types."""
        target = replace(self.config.target, sparsity=0.0, gguf_bytes=None)
        return replace(self.config, target=target, output=str(folder), profile=None, overwrite=False, resume=False)

    def _warn_of_narrow_layers(self) -> None:
        """Warn of equal layers that lose most of their neurons where sizes of their own would lose much less.

        What equal layers lose was measured without experts and with the whole hidden size.
        """
        run, shape = self.run, self.run.model.shape
        if run.grid.layers_differ or shape.experts is not None or self.plan.hidden is not None:
            return
        neurons = removed_neurons(self.plan, shape)
        better = better_form(run.config, run.model, run.form) if neurons > MANY_NEURONS else None
        if better is None:
            return
        share = 1 - run.grid.stack(self.plan).stored_parameters() / run.dense.stored_parameters()
        ranks = grid_of(better, run.model, run.config).ranks_embedding
        if not (ranks and run.model.shape.tied):  # as in no model that was measured
            known = "which also shrinks other linears, usually loses less"
        elif share > MEASURED_SHARE:
            known = (
                "which also shrinks other linears and the embedding, has lost much less at every measured size, up to "
                f"{MEASURED_SHARE:.0%}"
            )
        else:
            known = (
                "which also shrinks other linears and the embedding, has lost less than "
                f"{expected_of_own_sizes(share):.1f} times at this size"
            )
        logger.warning(
            "In the %s form this size takes %.0f %% of all FFN neurons, so expect about %.1f times the original's "
            "perplexity; --form %s, %s.",
            run.form.name,
            100 * neurons,
            expected_of_equal_layers(neurons),
            better.name,
            known,
        )

    def refuse_unserved(self) -> None:
        """Raise `PlanError` if the engine that is named does not open the result, or computes another model."""
        engine, run = self.config.target.serving.engine, self.run
        reason = None if engine is None else reason_against_result(engine, run.form.config(run.model, self.plan))
        if reason is not None:
            raise PlanError(reason)

    @property
    def further(self) -> FurtherResult | None:
        """Return the layers for tokens after the next one, as the result has them."""
        return self.run.further.result(self.plan)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Return what the written weights depend on; it reads the text."""
        return self.run.fingerprint(self.config, self.schedule)

    def finished_report(self) -> Report | None:
        """Return the report if this job was finished before and is resumed, and remove what that run left."""
        if not self.config.resume or not (self.output / REPORT_NAME).exists():
            return None
        _ = self.fingerprint  # on every process: reading the text is shared work
        return self.run.machine.workers.share(0, self._finished)

    def _finished(self) -> Report | None:
        """Return the report at the output if it is this job's: of the same options, input and code."""
        path = self.output / REPORT_NAME
        try:
            report = Report.read(path)
        except FileNotFoundError:  # another run replaces the result
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if self.config.overwrite:
                return None
            raise OutputError(
                f"{path} is damaged ({cause(error)}), so it is unknown whether {self.output} is the result of this "
                "command; choose another --output or add --overwrite."
            ) from error
        if report.fingerprint != self.fingerprint or report.weights_hash != self.weights_hash():
            return None
        files = {self.output / name: size for name, size in report.file_bytes.items()}
        changed = [file for file, size in files.items() if not file.is_file() or file.stat().st_size != size]
        if changed and self.config.overwrite:
            return None
        if changed:
            raise OutputError(
                f"{changed[0]} is missing or was changed after this command wrote it; add --overwrite to "
                "make the result anew, or choose another --output."
            )
        remove_leftovers(self.output, self.fingerprint)
        return report

    def weights_hash(self) -> str:
        """Return one hash of all tensors of the input; it reads those that this process did not read yet."""
        checkpoint = self.run.model.checkpoint
        checkpoint.log_all()
        assert checkpoint.log is not None, "the main process of a run has one"
        return seal(dict(sorted(checkpoint.log.hashes.items())))

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        """Open the journal, and save what the run has before any layer: text that the model wrote, and latencies."""
        config, run, workers = self.config, self.run, self.run.machine.workers
        refuse_output(self.output, overwrite=config.overwrite, resume=config.resume and not self.output.exists())
        workers.wait()  # barrier: finish checks before writing
        parameters, is_final = run.grid.stack(self.plan).stored_parameters(), not self.schedule.plans_by_profile
        with Journal(
            self.output,
            fingerprint=self.fingerprint,
            workers=workers,
            overwrite=config.overwrite,
            resume=config.resume,
            expected_bytes=sum(file_bytes(run, config, parameters, self.plan, is_final=is_final)),
            log=run.model.checkpoint.log,
            background=run.machine.device.type == "cuda",
        ) as journal:
            if run.saved_text is not None:
                journal.save(SAVED_TEXT, run.saved_text)
            if run.timings is not None:
                journal.save(SAVED_TIMINGS, run.timings)
            yield journal


def plan_jobs(configs: Sequence[Config], run: Run) -> list[Job]:
    """Plan a job for every config, and tell the tracker of the run their stages; what they share comes once.

    Raises as `Job`, and `ConfigError` for settings that cannot act.
    """
    for config in configs:
        refuse_idle(run.grid, run.method, config)
    jobs = [Job(config, run) for config in configs]
    of_jobs = [stages_of(run, job.config, job.schedule, job.plan, job.footprint) for job in jobs]
    shared = {name: stages[name] for name in SHARED_STAGES for stages in of_jobs if name in stages}
    own = [stage for stages in of_jobs for stage in stages.items() if stage[0] not in shared]
    run.tracker.expect([*shared.items(), *own])
    return jobs
