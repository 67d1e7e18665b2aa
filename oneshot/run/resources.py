"""Resources shared by all targets of a run: the machine, the model, the method, the text and the profile."""

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from oneshot_kernels.backend import ENVIRONMENT_VARIABLE

from oneshot.architecture import StackShape, predicts_tokens, stated_class
from oneshot.checkpoint import (
    Checkpoint,
    FurtherLayers,
    GgufCheckpoint,
    Model,
    card_metadata,
    identify,
    locate_checkpoint,
    open_gguf,
)
from oneshot.checkpoint.dtypes import DTYPES
from oneshot.checkpoint.safe_files import companion_hashes, config_hash
from oneshot.checkpoint.tables import NOISE, sampled_difference, tied
from oneshot.compression import Curvature
from oneshot.config import Config, Target
from oneshot.errors import ConfigError, PlanError
from oneshot.export import Form, coordinates, expected_bytes, form_of, part_dtype
from oneshot.export.served import FORMS_OPENED, reason_against_form, reason_against_ranks
from oneshot.footprint import (
    Bounds,
    Work,
    check_stages,
    current_bounds,
    describe_work,
    load_libraries,
    predict_footprint,
    refuse_conversion,
    stage_seconds,
)
from oneshot.machine import (
    Machine,
    join_workers,
    resolve_device,
)
from oneshot.machine.memory import release_heap, reset_peak
from oneshot.method import AUTO, Method
from oneshot.planning import Budget, Grid, Plan, Profile, find_kept, parameter_budget, reason_against_own_sizes
from oneshot.profiling import (
    Timings,
    curvature_tokens,
    load_profile,
    make_profile,
    measure_curvature,
    measured_seconds,
    profile_hash,
    profile_origin,
    refuse_other,
)
from oneshot.report.progress import ProgressBar, Tracker, WarningLog
from oneshot.report.provenance import code_hash, processor_name, versions
from oneshot.report.records import Footprint
from oneshot.report.sharing import shared_name
from oneshot.run.calibration import Calibration
from oneshot.run.dtype import fitting_dtype, settled_dtype
from oneshot.run.further import Further
from oneshot.run.latencies import find_timings
from oneshot.schedule import Schedule
from oneshot.stream import check_family
from oneshot.text import (
    Text,
)

HEADER_BYTES = 256  # of a tensor, in the header of a weight file
logger = logging.getLogger(__name__)


class Run:
    """The resources that the targets of a run share. Text and profile are made at most once, when first needed.

    Args:
        source: an opened checkpoint whose weights need not be at hand (a dry run); None to find and open it.
        warnings: what collects warnings for the report already while the run is opened.

    Attributes:
        dense: the sizes of the input. grid: the sizes that the form of the result can state.
        dtype: of the forward passes, and why it was taken.
        method: with every `auto` settled for the grid. timings: by which latencies are planned, and where they were
            measured; None without such a plan.
        fits_text: whether sizes or weights of a target depend on the text.
        plans_by_profile: whether a target is planned by the given profile, whose model and text are those of the run.
    """

    def __init__(
        self,
        config: Config,
        scratch: Path,
        outputs: Sequence[Path] = (),
        *,
        tracker: Tracker | None = None,
        source: Checkpoint | None = None,
        warnings: WarningLog | None = None,
    ) -> None:
        self._config = config
        self.warnings = WarningLog() if warnings is None else warnings
        workers = join_workers(on_cpu=resolve_device(config.machine.device).type == "cpu")
        device = resolve_device(config.machine.device, workers.local_rank if workers.size > 1 else None)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        reset_peak()
        self.machine = Machine(device, torch.float32, scratch, workers, batch_size=config.machine.batch_size)
        self.tracker = tracker if tracker is not None and workers.is_main else Tracker()
        self._gguf = source if isinstance(source, GgufCheckpoint) else None
        opened = self._open() if source is None else source
        self.model = identify(opened)
        self._tell_of_class(opened)
        self._tell_of_quantised(opened)
        self._settle_tables()
        self._outputs = outputs
        sizes = self.model.shape.hidden_size, self.model.shape.intermediate_size
        self.dtype = settled_dtype(config.machine.dtype, self.machine, sizes, outputs if config.resume else ())
        self.machine = replace(self.machine, dtype=self.dtype.dtype)
        if source is None and workers.is_main:  # the others read the same files
            self.model = replace(self.model, checkpoint=self.model.checkpoint.logging())
        self.form = self._settled_form()
        plain, self.dense = self.model, self.model.stored  # without biases that only the result has
        if config.method.correction == "bias" and config.target.sparsity != 0:
            self.model = self.model.with_ffn_biases()
        self.further = Further(self.model, self.form)
        self.grid = self.grid_of(self.form)
        self.method = self._settled(config)
        reason = reason_against_ranks(config.target.serving, self.form, self.model)
        if self.method.plans_ranks and reason is not None:
            raise PlanError(reason)
        if plain.has_ranks:
            self._settle_ranks(plain)
        self._calibration = Calibration(config, self.model, outputs, self.tracker)
        self.timings: dict[str, Any] | None = None
        self._profile: Profile | None = None
        self._is_checked = False
        self.fits_text = self.plans_by_profile = False

    def _open(self) -> Checkpoint:
        """Find, fetch or convert the checkpoint, in one process for all."""
        checkpoint, machine = self._config.checkpoint, self.machine
        self.tracker.step(f"opening {shared_name(str(checkpoint))}")
        self._gguf = open_gguf(checkpoint)
        if self._gguf is not None:
            bounds = current_bounds(self._config.machine, machine.device)
            refuse_conversion(checkpoint, self._gguf, self._config.machine, bounds)
        folder = machine.workers.share(0, lambda: locate_checkpoint(checkpoint, machine.scratch, self._config.revision))
        return Checkpoint(folder)

    def _settled_form(self) -> Form:
        """Return the form of the result; `auto` is the best one that holds it and that opens where it is to be served.

        Raises `PlanError` for a form that does not open there.
        """
        choice, family, engine = self._config.form, self.model.family, self._config.target.serving.engine
        if choice != AUTO:
            form = form_of(choice, family)
        elif engine is None:
            form = self._best_form()
        else:
            forms = [form_of(name, family) for name in FORMS_OPENED[engine]]
            opened = [one for one in forms if reason_against_form(engine, one, self.model) is None]
            form = next(filter(self._suits, opened), form_of("stock", family))
        if (reason := reason_against_form(engine, form, self.model)) is not None:
            raise PlanError(reason)
        return form

    def _suits(self, form: Form) -> bool:
        """Return whether a form that an engine opens holds what is asked for, and is per-layer only if it gains."""
        return self._best_form().name == "per-layer" if form.name == "per-layer" else self._method_in(form) is not None

    @property
    def better_form(self) -> Form | None:
        """Return the per-layer form if it gains and opens where the stock form's result is to be served; else None."""
        best, engine = self._best_form(), self._config.target.serving.engine
        gains = best.name == "per-layer" and self.form.name == "stock"
        return best if gains and reason_against_form(engine, best, self.model) is None else None

    def _best_form(self) -> Form:
        """Return the per-layer form if the method plans ranks in it, or if no stock config can state what is asked for.

        Otherwise it is the stock form.
        """
        family = self.model.family
        per_layer, stock = form_of("per-layer", family), form_of("stock", family)
        method = self._method_in(per_layer)
        gains = method is not None and (method.plans_ranks or self._method_in(stock) is None)
        return per_layer if gains else stock

    def _method_in(self, form: Form) -> Method | None:
        """Return the method as it is settled for a form; None if the form cannot hold what is asked for.

        A loss needs a profile, which forms of equal layers have no use for.
        """
        try:
            method = self.grid_of(form).settle(self._config.method, self._config.target)
        except (ConfigError, PlanError):
            return None
        return None if self._config.target.max_loss is not None and not method.reads_profile else method

    def grid_of(self, form: Form) -> Grid:
        """Return the grid of a form, which knows the form that its refusals advise: per-layer, or else stock."""
        family = self.model.family
        kept = find_kept(self._config.target.keep, family, self.model.shape)
        grid = replace(self._alone(form), kept=kept, serving=self._config.target.serving)
        others = [form_of(name, family) for name in ("per-layer", "stock")]
        grids = [self._alone(other) for other in others if other.name != form.name]
        return replace(grid, instead=next((one for one in grids if one.refusal is None), None))

    def _alone(self, form: Form) -> Grid:
        """Return the grid of a form, which refuses an input whose layers differ already if the form cannot hold it."""
        grid = replace(form.grid(self.model), stored=self.model.stored if self.model.has_ranks else None)
        return replace(grid, refusal=grid.refusal or reason_against_own_sizes(grid))

    def _settle_ranks(self, plain: Model) -> None:
        """Count matrices of low rank as whole ones if the result has no ranks, and say from what shares count.

        `plain`: the model without biases that only the result has.
        """
        stored, method = self.dense, self.method
        counted = f"{stored.stored_parameters():,}"
        if (stored.has_linear_ranks and method.plans_ranks) or (stored.embedding and method.embedding == "low-rank"):
            logger.warning(
                "The input stores matrices of low rank, which are multiplied out when they are read; ranks are chosen "
                "anew, and removed shares count from the %s parameters that it stores.",
                counted,
            )
            return
        self.model, self.dense = self.model.as_whole(), plain.as_whole().stored
        self.grid = self.grid_of(self.form)
        logger.warning(
            "The input stores matrices of low rank, which this result has whole: removed shares count from %s "
            "parameters, and the input stores %s; --form per-layer with its default options keeps ranks.",
            f"{self.dense.stored_parameters():,}",
            counted,
        )

    def _settled(self, config: Config) -> Method:
        """Return the method with every `auto` settled; it has the curvature of a given profile if it can."""
        method = self.grid.settle(config.method, config.target)
        if config.profile is None or config.method.curvature != AUTO:
            return method
        made = profile_origin(Path(config.profile).expanduser()).curvature
        may_weigh = self.grid.has_curvature and method.may_weigh_output
        return replace(method, curvature="fisher" if made == "fisher" and may_weigh else "none")

    def _settle_tables(self) -> None:
        """Tie the tables if the user says so, or else say that two of them seem to be one."""
        model, checkpoint = self.model, self.model.checkpoint
        if self._config.tie:
            self.model = identify(tied(checkpoint, model.family))
            logger.warning(
                "--tie stores one table for embedding and output head: removed shares count from %s parameters, "
                "and the checkpoint has %s.",
                f"{self.model.checkpoint.num_parameters:,}",
                f"{checkpoint.num_parameters:,}",
            )
            return
        difference = sampled_difference(checkpoint, model.family)
        if difference is not None and difference <= NOISE:
            share = model.shape.vocab_size * model.shape.hidden_size / checkpoint.num_parameters
            logger.warning(
                "The output head and the embedding differ by %.1f %%, as copies of one table do; --tie stores one of "
                "them, which removes %.0f %% of the parameters and little else.",
                100 * difference,
                100 * share,
            )

    def _tell_of_class(self, opened: Checkpoint) -> None:
        """Say that no head is stored where the config states a class with one."""
        stated, found = stated_class(opened.config), stated_class(self.model.checkpoint.config)
        if predicts_tokens(opened.config) and not predicts_tokens(self.model.checkpoint.config):
            logger.warning(
                "The checkpoint has no output head, although config.json states %s: the result is a %s, which writes "
                "no text.",
                stated or f"a {self.model.family.model_type}",
                found,
            )

    def _tell_of_quantised(self, opened: Checkpoint) -> None:
        """Say that weights were rounded before, and what they are read as."""
        weights = opened.quantised.weights.values()
        if opened.quantised.kind is None or not weights:
            return
        dtypes = " and ".join(sorted({str(DTYPES[one.dtype]).removeprefix("torch.") for one in weights}))
        logger.warning(
            "The weights were rounded when they were quantised (%s); they are read as %s, which a result also stores "
            "unless --save-dtype says otherwise. Give the unquantised model if there is one.",
            opened.quantised.kind,
            dtypes,
        )

    def check_text(self) -> None:
        """Raise `CalibrationError` if a file of the calibration text cannot be read; nothing is read yet."""
        self._calibration.check()

    def warn_of_text(self) -> None:
        """Warn as for the calibration text that a run would read, if its sources hold what is asked for."""
        if self.fits_text:
            self._calibration.warn_if_few(self._config.text.num_tokens)
        self._calibration.warn_if_long()

    def check_family(self) -> None:
        """Refuse a model that its family's description does not fit; it is checked once, by reading a layer."""
        if not self._is_checked:
            self.tracker.step("comparing a layer with its stock class", brief=True)
            check_family(self.model, self.machine)
            if isinstance(self.further.layers, FurtherLayers):
                check_family(self.further.layers.layers[0].model, self.machine)
            self._is_checked = True

    def use_memory(self, footprint: Footprint) -> None:
        """Keep activations where the footprint of the run says, and as many experts together; say what `auto` took."""
        if self.dtype.reason:
            self.tracker.say(f"The forward passes are in {self.dtype.reason}.")
        together = footprint.experts_together
        self.machine = replace(self.machine, store=footprint.store, experts_together=together)

    @cached_property
    def text(self) -> Text:
        """Return the calibration text, all of it in every process."""
        with self.warnings.shared():
            read = partial(self._calibration.read, self.machine, plans_by_profile=self.plans_by_profile)
            text = self.machine.workers.share(0, read)
            release_heap()  # of the tokeniser
            if self.fits_text:
                self._calibration.warn_if_few(text.num_tokens)
            self._calibration.warn_if_long()
        return text

    @property
    def written_text(self) -> Text | None:
        """Return the sequences that the model wrote in this process; None if it wrote none."""
        return self._calibration.written

    @property
    def saved_text(self) -> dict[str, Any] | None:
        """Return them as JSON values, which a run that continues or plans from a profile reads again."""
        written = self.written_text
        return None if written is None else {"seed": self._config.seed, "token_ids": written.token_ids.tolist()}

    def profile(self, schedule: Schedule) -> Profile:
        """Return the given profile if it belongs to this model and text, or one made now; each run has one."""
        if self._profile is None:
            if self._config.profile is None:
                with self.warnings.shared():
                    self._profile = self.make_profile(schedule)
            else:
                self._profile = load_profile(Path(self._config.profile).expanduser())
                refuse_other(
                    self._profile,
                    self._config.profile,
                    model_hash=self.model.checkpoint.content_hash(),
                    config_hash=config_hash(self.model.checkpoint.folder),
                    token_hash=self.text.token_hash,
                    curvature=self.method.curvature,
                    log=self.model.checkpoint.log,
                )
        return self._profile

    def make_profile(self, schedule: Schedule) -> Profile:
        """Profile the model. Raises `PlanError` for a family that cannot be profiled."""
        reason = self.model.family.reason_against("profile")
        if reason is not None:
            raise PlanError(reason)
        return make_profile(
            self.model,
            self.text,
            self.method,
            self.machine,
            kinds=schedule.profiled_kinds,
            with_embedding=schedule.profiles_embedding,
            curvature=self.curvature if schedule.measures_curvature else None,
            tracker=self.tracker,
        )

    @cached_property
    def curvature(self) -> Curvature:
        """Return the output curvature of every layer, measured when it is first needed."""
        num_tokens = self.text.first(curvature_tokens(self.text.num_tokens)).num_tokens
        progress = ProgressBar(
            self.tracker,
            num_layers=2 * self.model.shape.num_hidden_layers,  # forward and back
            total=num_tokens,
            stage="curvature",
        )
        with self.warnings.shared():
            return measure_curvature(
                self.model, self.text, self.machine, seed=self._config.seed, advance=progress.advance
            )

    @cached_property
    def _seconds(self) -> Callable[[StackShape], float]:
        """Return the seconds of a model's sizes. The main process measures, and a run that continues does not."""
        length, read_by = self._config.text.sequence_length, coordinates if self.method.plans_ranks else None
        measured_on = self._environment() | {"sequence_length": length, "ranks": self.method.plans_ranks}
        measured_on |= {"form": self.form.name}

        def seconds(timings: Timings) -> Callable[[StackShape], float]:
            return measured_seconds(self.model, self.machine, length, coordinates=read_by, timings=timings)

        def take() -> list[list[float]]:
            timings = Timings(find_timings(self._outputs if self._config.resume else (), measured_on))
            seconds(timings)
            return timings.taken

        taken = self.machine.workers.share(0, take)
        self.timings = {"measured_on": measured_on, "taken": taken}
        return seconds(Timings(taken))

    def budget(self, target: Target) -> Budget:
        """Return what a target asks for, in its own unit."""
        checkpoint, dense = self.model.checkpoint, self.dense
        if target.size_bytes is not None:
            return self._file_budget(target.size_bytes)
        kept = 1 - (target.sparsity or 0.0)
        if target.budget == "bytes":
            each = expected_bytes(self._config.save_dtype, checkpoint, 10**9) / 10**9
            is_gguf = (
                Path(self._config.checkpoint).suffix == ".gguf"
            )  # other types; its weights count as they are saved
            whole = each * dense.stored_parameters() if is_gguf else checkpoint.tensor_bytes
            return Budget(kept * whole, lambda stack: each * stack.stored_parameters(), "bytes")
        if target.budget == "flops":
            return Budget(kept * dense.flops_per_token(), StackShape.flops_per_token, "FLOPs per token")
        if target.budget == "latency":
            reason = self.model.family.reason_against("latency")
            if reason is not None:
                raise PlanError(reason)
            return Budget(kept * self._seconds(dense), self._seconds, "seconds")
        return parameter_budget(target, dense)

    def _file_budget(self, size_bytes: int) -> Budget:
        """Return a ceiling of the bytes of the weight files, with headers; mixed dtypes count as the narrowest."""
        checkpoint, dense = self.model.checkpoint, self.dense.stored_parameters()
        whole = expected_bytes(self._config.save_dtype, checkpoint, dense)
        narrowest = whole / dense if self._config.save_dtype != "keep" else math.floor(whole / dense)
        whole += expected_bytes(self._config.save_dtype, checkpoint, self.further.most_parameters)
        headers = HEADER_BYTES * 2 * len(checkpoint.shapes)  # a linear of low rank is two tensors
        if not self.form.is_safetensors:  # one file, with the vocabulary
            headers += sum(path.stat().st_size for path in checkpoint.folder.glob("tokenizer*"))

        def measure(stack: StackShape) -> float:
            return headers + whole - narrowest * (dense - stack.stored_parameters())

        return Budget(size_bytes, measure, "bytes", is_ceiling=True)

    def fingerprint(self, config: Config, schedule: Schedule) -> dict[str, Any]:
        """Return what the written weights depend on: runs with equal fingerprints write the same bytes."""
        return self._environment() | {
            "text": self.text.token_hash if schedule.reads_text else None,
            "options": config.fingerprint() | {"profile": self._profile_hash(config)},
        }

    def _environment(self) -> dict[str, Any]:
        """Return the part of a fingerprint that is known before the text: input, machine and code."""
        device = self.machine.device
        return {
            "model": self.model.checkpoint.content_hash(),  # the journal has hashes of all that was read
            "files": companion_hashes(self.model.checkpoint.folder),
            "card": card_metadata(self.model.checkpoint.folder),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processor": processor_name(),
            "kernels": os.environ.get(ENVIRONMENT_VARIABLE, ""),
            "dtype": str(self.machine.dtype),
            "batch_size": self.machine.batch_size,
            "threads": torch.get_num_threads(),
            "processes": self.machine.workers.size,
            "versions": versions(),
            "code": code_hash(),
        }

    def _profile_hash(self, config: Config) -> str | None:
        return None if config.profile is None else profile_hash(Path(config.profile).expanduser())

    def footprint(self, config: Config, schedule: Schedule, plan: Plan | None, *, dry: bool = False) -> Footprint:
        """Return what the run of a plan will take (None: only a profile); raises `MemoryLimitError` before any work.

        `dry`: also predict seconds, for which the machine is timed.
        """
        load_libraries(self.model, self.machine, config.text.calibration)
        bounds = current_bounds(config.machine, self.machine.device)

        def work_on(machine: Machine) -> Work:
            return describe_work(config, self.model, self.method, self.grid, schedule, plan, machine)

        self._fit_dtype(work_on, bounds)
        result_bytes, beside_bytes = (0, 0)
        if plan is not None:
            result_bytes, beside_bytes = self.result_bytes(config, self.grid.stack(plan).stored_parameters(), plan)
        work = work_on(self.machine)
        check = check_stages(work, self._gguf, result_bytes) if self.form.opened_by == "transformers" else []

        def predicted(work: Work) -> Footprint:
            return predict_footprint(
                work,
                bounds,
                config.machine,
                result_bytes=result_bytes,
                beside_bytes=beside_bytes,
                check=check,
                measure_time=dry,
                dtype=self.dtype.reason,
            )

        footprint = predicted(work)
        if self.model.shape.experts is None:
            return footprint
        together = [each for each in self.machine.workers.gather((footprint.experts_together,)) if each is not None]
        if together and footprint.experts_together != min(together):  # processes sum statistics of the same experts
            work = replace(work, machine=replace(work.machine, experts_together=min(together)))
            footprint = predicted(work)
        return footprint

    def _fit_dtype(self, work_on: Callable[[Machine], Work], bounds: Bounds) -> None:
        """Take bfloat16 if float32 is only faster, and memory does not hold the run in it."""
        if self._is_checked or self.timings is not None or "text" in self.__dict__:  # computed in the dtype
            return
        taken = fitting_dtype(self.dtype, self.machine, work_on, bounds)
        if taken != self.dtype:
            self.dtype, self.machine = taken, replace(self.machine, dtype=taken.dtype)

    def stage_seconds(
        self, config: Config, schedule: Schedule, plan: Plan | None, footprint: Footprint
    ) -> dict[str, float]:
        """Return the stages of a run in order, and predicted seconds of which only ratios count."""
        machine = replace(self.machine, experts_together=footprint.experts_together)
        work = describe_work(config, self.model, self.method, self.grid, schedule, plan, machine)
        return stage_seconds(work, footprint.store)

    def result_bytes(self, config: Config, parameters: int, plan: Plan) -> tuple[int, int]:
        """Return the bytes of so many weights, and of those beside them that a form with a file of its own needs.

        `plan`: whose layers for tokens after the next one are in the same files.
        """
        parameters += self.further.parameters(plan)
        of_parts, of_result = (
            expected_bytes(dtype, self.model.checkpoint, parameters)
            for dtype in (part_dtype(config.save_dtype), config.save_dtype)
        )
        rounded = of_result if config.quantises else 0  # a second file, before it replaces the first
        return of_result, 0 if self.form.is_safetensors else of_parts + rounded
