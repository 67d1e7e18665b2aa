"""What the results of a run share: the machine, the model, the method, the text and the profile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from oneshot.architecture import StackShape
from oneshot.checkpoint import Checkpoint, FurtherLayers, GgufCheckpoint
from oneshot.checkpoint.safe_files import config_hash
from oneshot.compression import Curvature
from oneshot.config import Config, Target
from oneshot.errors import PlanError
from oneshot.export import coordinates
from oneshot.export.quantised import quantisation_of, refuse_quantised_form, refuse_quantising, refuse_quantising_kept
from oneshot.export.served import reason_against_ranks
from oneshot.machine import DtypeChoice, Machine, join_workers, resolve_device
from oneshot.machine.memory import release_heap, reset_peak
from oneshot.planning import Profile, removed_unit, with_groups
from oneshot.profiling import (
    Timings,
    curvature_of_profile,
    curvature_tokens,
    holds_curvature,
    load_profile,
    make_profile,
    measure_curvature,
    measured_seconds,
    profile_hash,
    profile_origin,
    refuse_other_model,
    refuse_other_text,
)
from oneshot.report.progress import ProgressBar, Stopwatch, Tracker, WarningLog
from oneshot.report.records import Footprint
from oneshot.run.calibration import Calibration, broadened
from oneshot.run.dtype import settled_dtype
from oneshot.run.earlier import earlier_timings, environment
from oneshot.run.forms import grid_of, settled_form, settled_method
from oneshot.run.further import Further
from oneshot.run.inputs import open_input, read_model, tell_of_ranks
from oneshot.schedule import Schedule
from oneshot.stream import check_family
from oneshot.text import BUILTIN, Text


class Run:
    """What the results of a run share. Text and profile are made at most once, when first needed.

    Args:
        source: an opened checkpoint whose weights need not be at hand (a dry run); None to find and open it.
        warnings: what collects warnings for the report already while the run is opened.

    Attributes:
        watch: the seconds of the stages of the present result; what all share counts for the first.
        gguf: the file that the model is read from; None for other inputs.
        dense: the sizes of the input. grid: the sizes that the form of the result can state.
        quantisation: of the results' linears; None: they are not quantised.
        dtype: of the forward passes, and why it was taken.
        method: with every `auto` settled for the grid. timings: by which latencies are planned, and where they were
            measured; None without such a plan.
        text_options: the calibration text that is read: the config's or, of one source, a broader one.
        fits_text: whether sizes or weights of a result depend on the text.
        plans_by_profile: whether a result is planned by the given profile, which has the run's model and text.
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
        self.config, self._outputs = config, outputs
        self.warnings = WarningLog() if warnings is None else warnings
        self.watch = Stopwatch()
        # 1. the machine
        workers = join_workers(on_cpu=resolve_device(config.machine.device).type == "cpu")
        device = resolve_device(config.machine.device, workers.local_rank if workers.size > 1 else None)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        reset_peak()
        self.machine = Machine(device, torch.float32, scratch, workers, batch_size=config.machine.batch_size)
        self.tracker = tracker if tracker is not None and workers.is_main else Tracker()
        # 2. the model
        self.gguf = source if isinstance(source, GgufCheckpoint) else None
        if source is None:
            opened, self.gguf = open_input(config, self.machine, self.tracker)
        else:
            opened = source
        self.model = read_model(opened, tie=config.tie)
        if config.quantise is not None:
            refuse_quantising(config.quantise, self.model, config.target.serving)
        self.config = config = replace(config, target=self.grouped(config.target))
        self.quantisation = quantisation_of(config, self.model)
        sizes = self.model.shape.hidden_size, self.model.shape.intermediate_size
        self.dtype = settled_dtype(config.machine.dtype, self.machine, sizes, outputs if config.resume else ())
        self.take_dtype(self.dtype)
        if source is None and workers.is_main:  # the others read the same files
            self.model = replace(self.model, checkpoint=self.model.checkpoint.logging())
        # 3. the form of the results, and the method in it
        self.form = settled_form(config, self.model)
        if config.quantise is not None:
            refuse_quantised_form(self.form, self.model, config.target.serving)
        plain, self.dense = self.model, self.model.stored  # without biases that only the result has
        if config.method.correction == "bias" and config.target.sparsity != 0:
            self.model = self.model.with_ffn_biases()
        self.further = Further(self.model, self.form)
        self.grid = grid_of(self.form, self.model, config)
        if config.quantise is not None:
            refuse_quantising_kept(self.grid)
        self.method = settled_method(config, self.grid)
        reason = reason_against_ranks(config.target.serving, self.form, self.model)
        if self.method.plans_ranks and reason is not None:
            raise PlanError(reason)
        if plain.has_ranks and not tell_of_ranks(self.dense, plain, self.method):
            self.model, self.dense = self.model.as_whole(), plain.as_whole().stored
            self.grid = grid_of(self.form, self.model, config)
        # 4. what is read and measured later
        self.text_options = config.text
        if config.target.sparsity != 0 and config.recipe == "oneshot" and self.method.reduces_ffn:  # no paper's method
            self.text_options = broadened(config.text, self.model)
        self.timings: dict[str, Any] | None = None
        self._profile: Profile | None = None
        self._is_checked = False
        self.fits_text = self.plans_by_profile = False

    def grouped(self, target: Target) -> Target:
        """Return a target whose sizes are whole groups of the weights that are rounded together."""
        return with_groups(target, self.config.quantise, self.model.shape)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Show nothing of the stages inside the block, which belong to no stage that was expected."""
        tracker, self.tracker = self.tracker, Tracker()
        try:
            yield
        finally:
            self.tracker = tracker

    def begin_next(self) -> None:
        """Count seconds and memory for the next result from now on."""
        self.watch = Stopwatch()
        reset_peak()

    @property
    def has_computed(self) -> bool:
        """Return whether anything was computed already, in the dtype of the run."""
        return self._is_checked or self.timings is not None or "text" in self.__dict__

    def take_dtype(self, choice: DtypeChoice) -> None:
        """Compute in a dtype from now on."""
        self.dtype, self.machine = choice, replace(self.machine, dtype=choice.dtype)

    def use_memory(self, footprint: Footprint) -> None:
        """Keep activations where the footprint says, and as many experts together; say what `auto` took."""
        if self.dtype.reason:
            self.tracker.say(f"The forward passes are in {self.dtype.reason}.")
        together = footprint.experts_together
        self.machine = replace(self.machine, store=footprint.store, experts_together=together)

    def check_family(self) -> None:
        """Refuse a model that its family's description does not fit; it is checked once, by reading a layer."""
        if not self._is_checked:
            self.tracker.step("comparing a layer with its stock class", brief=True)
            check_family(self.model, self.machine)
            if isinstance(self.further.layers, FurtherLayers):
                check_family(self.further.layers.layers[0].model, self.machine)
            self._is_checked = True

    def check_text(self) -> None:
        """Raise `CalibrationError` if a file of the calibration text cannot be read; nothing is read yet."""
        self._calibration.check()

    @cached_property
    def _calibration(self) -> Calibration:
        return Calibration(self.config, self.text_options, self.model, self._outputs, self.tracker)

    def warn_of_text(self) -> None:
        """Warn as for the calibration text that a run would read, if its sources hold what is asked for."""
        if self.fits_text:
            self._calibration.warn_if_few(self.config.text.num_tokens)
        self._calibration.warn_if_long()

    @cached_property
    def text(self) -> Text:
        """Return the calibration text, all of it in every process."""
        with self.warnings.shared():
            text = self._calibration.read(self.machine, plans_by_profile=self.plans_by_profile)
            release_heap()  # of the tokeniser
            if self.fits_text:
                self._calibration.warn_if_few(text.num_tokens)
            self._calibration.warn_if_long()
        num_added = self._calibration.num_read.get(BUILTIN, 0)
        if self.config.text != self.text_options and self.machine.workers.is_main and num_added:
            self.tracker.say(
                f"{num_added} of the {text.num_sequences} sequences are from {BUILTIN}, so "
                "that what one source of text lacks stays in the model; a source named twice, TEXT+TEXT, is read alone."
            )
        return text

    @property
    def saved_text(self) -> dict[str, Any] | None:
        """Return the text that the model wrote as JSON values; None if it wrote none.

        A run that continues this one, or plans from its profile, reads it again.
        """
        written = self._calibration.written
        return None if written is None else {"seed": self.config.seed, "token_ids": written.token_ids.tolist()}

    @cached_property  # each answer reads the profile's checksums
    def has_curvature(self) -> bool:
        """Return whether a profile is given that also has the output curvature."""
        profile = self.config.profile
        return profile is not None and holds_curvature(Path(profile).expanduser())

    @cached_property
    def curvature(self) -> Curvature:
        """Return the output curvature of every layer, measured when it is first needed or read from the profile."""
        if self.plans_by_profile and self.has_curvature:
            return curvature_of_profile(Path(str(self.config.profile)).expanduser())
        num_tokens = self.text.first(curvature_tokens(self.text.num_tokens)).num_tokens
        progress = ProgressBar(
            self.tracker,
            num_layers=2 * self.model.shape.num_hidden_layers,  # forward and back
            total=num_tokens,
            stage="curvature",
        )
        with self.warnings.shared():
            return measure_curvature(
                self.model, self.text, self.machine, seed=self.config.seed, advance=progress.advance
            )

    def profile(self, schedule: Schedule) -> Profile:
        """Return the given profile if it belongs to this model and text, or one made now; each run has one."""
        if self._profile is None:
            if self.config.profile is None:
                with self.warnings.shared():
                    self._profile = self.make_profile(schedule)
            else:
                self.check_profile()
                self._profile = load_profile(Path(self.config.profile).expanduser())
                refuse_other_text(
                    self._profile, self.config.profile, token_hash=self.text.token_hash, log=self.model.checkpoint.log
                )
        return self._profile

    def check_profile(self) -> None:
        """Raise `ProfileError` if the given profile is of another model; its text is compared when it is read."""
        assert self.config.profile is not None
        checkpoint, model_hash, hash_of_config = self.model.checkpoint, None, None
        if checkpoint.weights_at_hand and not isinstance(checkpoint, GgufCheckpoint):  # which a run converts before
            model_hash, hash_of_config = checkpoint.content_hash(), config_hash(checkpoint.folder)
        refuse_other_model(
            profile_origin(Path(self.config.profile).expanduser()),
            self.config.profile,
            model_hash=model_hash,
            config_hash=hash_of_config,
            curvature=self.method.curvature,
            head_unit=removed_unit(self.method, self.model.shape),
            damping=self.method.fixed_damping,
        )

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
            tables=schedule.profiled_tables,
            curvature=self.curvature if schedule.weighs_output else None,
            tracker=self.tracker,
        )

    @cached_property
    def latency(self) -> Callable[[StackShape], float]:
        """Return the seconds of a model's sizes. The main process measures, and a run that continues does not."""
        length, read_by = self.config.text.sequence_length, coordinates if self.method.plans_ranks else None
        measured_on = environment(self.model, self.machine) | {
            "sequence_length": length,
            "ranks": self.method.plans_ranks,
        }
        measured_on |= {"form": self.form.name}

        def seconds(timings: Timings) -> Callable[[StackShape], float]:
            return measured_seconds(self.model, self.machine, length, coordinates=read_by, timings=timings)

        def take() -> list[list[float]]:
            timings = Timings(earlier_timings(self._outputs if self.config.resume else (), measured_on))
            seconds(timings)
            return timings.taken

        taken = self.machine.workers.share(0, take)
        self.timings = {"measured_on": measured_on, "taken": taken}
        return seconds(Timings(taken))

    def fingerprint(self, config: Config, schedule: Schedule) -> dict[str, Any]:
        """Return what the written weights depend on: runs with equal fingerprints write the same bytes."""
        profile = None if config.profile is None else profile_hash(Path(config.profile).expanduser())
        return environment(self.model, self.machine) | {
            "text": self.text.token_hash if schedule.reads_text else None,
            "options": config.fingerprint() | {"profile": profile},
        }
