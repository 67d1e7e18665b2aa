"""What a run begins with: the model, the method, the text, the profile, the processes that share it."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from oneshot.calibration import load_calibration, load_tokenizer, mixed, shares, split_sources
from oneshot.checkpoint import Checkpoint
from oneshot.config import TOKENS_PER_NEURON, CompressionConfig
from oneshot.errors import DeviceError, OutputError
from oneshot.footprint import (
    current_bounds,
    describe_work,
    gguf_header,
    load_libraries,
    offload_folder,
    predict_footprint,
    refuse_conversion,
)
from oneshot.layerwise import PROBED_KINDS, LayerProfiler, measured_seconds
from oneshot.plan import Budget, head_unit, wanted_parameters
from oneshot.profiles import load_profile, refuse_other
from oneshot.recipes import resolve_recipe
from oneshot.records import CalibrationSet, Footprint, ModelShape, Plan, Profile, ProfileOrigin, StackShape
from oneshot.report import ProgressBar, Stopwatch, WarningLog, versions
from oneshot.result import expected_bytes, output_folder
from oneshot.sampling import SELF, sample_calibration
from oneshot.source import SourceModel, identify, resolve_checkpoint
from oneshot.stream import prefetch, release_heap, resolve_device, resolve_dtype
from oneshot.workers import join_workers
from oneshot.writer import kept_values

logger = logging.getLogger(__name__)

# Options that say where things are and what may be done, not what comes out.
SHAPELESS = (
    "checkpoint",
    "output",
    "calibration",
    "device",
    "dtype",
    "max_memory_bytes",
    "max_device_memory_bytes",
    "offload_dir",
    "overwrite",
    "resume",
)


@contextmanager
def open_inputs(config: CompressionConfig, *, show_progress: bool) -> Iterator["Inputs"]:
    """The inputs of a run, with a scratch folder in the off-load folder for as long as it takes."""
    folder = offload_folder(config)
    try:
        scratch = tempfile.TemporaryDirectory(prefix="oneshot-", dir=folder)
    except OSError as error:
        raise OutputError(
            f"Nothing can be written to {folder} ({error.strerror}); name another folder as --offload-dir."
        ) from error
    with scratch as name, torch.inference_mode():
        try:
            inputs = Inputs(config, Path(name), show_progress=show_progress)
            with inputs.warnings:
                yield inputs
            inputs.workers.wait()  # the others may be reading what lies in this one's scratch folder
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceError(
                "The CUDA device is out of memory; lower --batch-size or --sequence-length, or give a smaller "
                "--max-device-memory, for which activations leave it."
            ) from error


class Inputs:
    """What runs with other targets have in common: the model, the method, the text, the profile. Each is read once.

    `source`: the model where it is open already; else the one that the config names, converted in `scratch` if need be.
    """

    def __init__(
        self, config: CompressionConfig, scratch: Path, *, show_progress: bool, source: SourceModel | None = None
    ) -> None:
        self.watch, self.warnings = Stopwatch(), WarningLog()
        self.recipe = resolve_recipe(
            config.recipe,
            ffn=config.ffn,
            heads=config.heads,
            correction=config.correction,
            pivoting=config.pivoting,
            sketch=config.sketch,
            hidden=config.hidden,
            embedding=config.embedding,
            up_steps=config.up_steps,
            tier=config.tier,
            group_size=config.group_size,
            allocation=config.allocation,
            depth=config.depth,
        )
        self.workers = join_workers(on_cpu=resolve_device(config.device).type == "cpu")
        self.device = resolve_device(config.device, self.workers.local_rank if self.workers.size > 1 else None)
        self.dtype = resolve_dtype(config.dtype, self.device)
        self.source = source or self._open(config, scratch)
        self.dense = self.source.shape.stack()
        if self.recipe.correction == "bias" and config.sparsity != 0:  # else there is nothing to make up for
            self.source = self.source.with_ffn_biases()
        self.scratch, self.show_progress = scratch, show_progress and self.workers.is_main
        self.written: CalibrationSet | None = None  # what the model wrote itself, in the process that let it
        self._calibration: CalibrationSet | None = None
        self._profile: Profile | None = None
        self._seconds: Callable[[StackShape], float] | None = None

    def _open(self, config: CompressionConfig, scratch: Path) -> SourceModel:
        """Find, fetch or convert the checkpoint, in one process for all."""
        header = gguf_header(config.checkpoint)
        if header is not None:
            refuse_conversion(config, header, current_bounds(config, self.device))
        return identify(Checkpoint(self.workers.share(0, lambda: resolve_checkpoint(config.checkpoint, scratch))))

    def read_text(self, config: CompressionConfig) -> CalibrationSet:
        """The calibration text: all of it, in every process."""
        if self._calibration is None:
            self._calibration = self.workers.share(0, lambda: self._load_text(config))
            release_heap()  # tokenising a long text leaves much behind
            _warn_if_short(self._calibration, self.source.shape)
        return self._calibration

    def _load_text(self, config: CompressionConfig) -> CalibrationSet:
        tokenizer = load_tokenizer(self.source.checkpoint.folder)
        sources = split_sources(config.calibration)
        counts = shares(config.num_sequences, sources)
        parts = [self._load_source(config, *part, tokenizer) for part in zip(sources, counts, strict=True)]
        return mixed(parts, config.seed)

    def _load_source(
        self, config: CompressionConfig, source: str, num_sequences: int, tokenizer: Any
    ) -> CalibrationSet:
        if source != SELF:
            return load_calibration(
                source,
                tokenizer,
                num_sequences=num_sequences,
                sequence_length=config.sequence_length,
                seed=config.seed,
            )
        self.written = self._kept_text(config, num_sequences) or self._write_text(config, num_sequences, tokenizer)
        return self.written

    def _kept_text(self, config: CompressionConfig, num_sequences: int) -> CalibrationSet | None:
        """What the model wrote for the interrupted run that shall go on; its fingerprint says whether it is that."""
        kept = kept_values(output_folder(config), SELF) if config.resume else None
        if kept is None:
            return None
        token_ids = torch.tensor(kept["token_ids"])
        return CalibrationSet(token_ids, SELF) if token_ids.shape == (num_sequences, config.sequence_length) else None

    def _write_text(self, config: CompressionConfig, num_sequences: int, tokenizer: Any) -> CalibrationSet:
        num_tokens = num_sequences * config.sequence_length
        with ProgressBar(
            num_layers=1, num_tokens=num_tokens, visible=self.show_progress, description="writing text"
        ) as progress:
            return sample_calibration(
                self.source.checkpoint.folder,
                tokenizer,
                num_sequences=num_sequences,
                sequence_length=config.sequence_length,
                seed=config.seed,
                device=self.device,
                dtype=self.dtype,
                max_memory_bytes=config.max_memory_bytes,
                advance=progress.advance,
            )

    def read_profile(self, config: CompressionConfig, tier: str) -> Profile:
        """The profile given, if it belongs to this model and text, or one made now with activations in `tier`."""
        if self._profile is None:
            if config.profile is not None:
                self._profile = load_profile(Path(config.profile).expanduser())
                model_hash, token_hash = self.source.checkpoint.content_hash(), self.read_text(config).token_hash
                refuse_other(self._profile, config.profile, model_hash=model_hash, token_hash=token_hash)
            else:
                self._profile = self.make_profile(
                    config, tier, probed=self.probed_kinds(), embedding=self.recipe.embedding != "none"
                )
        return self._profile

    def budget(self, config: CompressionConfig) -> Budget:
        """What `config.sparsity` asks for, in the units of `config.budget`."""
        checkpoint, dense = self.source.checkpoint, self.dense
        if config.budget == "parameters":
            return Budget(wanted_parameters(config, dense.stored_parameters()))
        kept = 1 - (config.sparsity or 0.0)
        if config.budget == "bytes":
            each = expected_bytes(config.save_dtype, checkpoint, 10**9) / 10**9
            return Budget(kept * checkpoint.num_bytes, lambda stack: each * stack.stored_parameters(), "bytes")
        if config.budget == "flops":
            return Budget(kept * dense.flops_per_token(), StackShape.flops_per_token, "FLOPs per token")
        if self._seconds is None:
            self._seconds = measured_seconds(
                self.source, sequence_length=config.sequence_length, device=self.device, dtype=self.dtype
            )
        return Budget(kept * self._seconds(dense), self._seconds, "seconds")

    def fingerprint(self, config: CompressionConfig, calibration: CalibrationSet | None) -> dict[str, Any]:
        """What the weights that a run writes depend on: runs with equal fingerprints write the same bytes."""
        options = {name: value for name, value in config.to_dict().items() if name not in SHAPELESS}
        return {
            "model": self.source.checkpoint.content_hash(),
            "text": None if calibration is None else calibration.token_hash,
            "device": self.device.type,
            "dtype": str(self.dtype),
            "threads": torch.get_num_threads(),
            "processes": self.workers.size,
            "options": options,
            "versions": versions(),
        }

    def probed_kinds(self) -> list[str]:
        """The kinds of blocks that shrink, whose sensitivity a profile of this run's own measures."""
        chosen = {"ffn": self.recipe.ffn, "heads": self.recipe.heads, "layer": self.recipe.depth}
        return [kind for kind in PROBED_KINDS if chosen[kind] != "none"]

    def footprint(self, config: CompressionConfig, plan: Plan | None, *, dry: bool = False) -> Footprint:
        """What the run of a plan will take (None: a profile alone); raises `MemoryLimitError` before any work.

        `dry`: with its seconds, for which the machine is timed.
        """
        load_libraries(self.source, config, self.device, self.dtype)
        profiled_kinds, exact, result_bytes = len(PROBED_KINDS), True, 0
        if plan is not None:
            exact = not (self.recipe.reads_profile and plan.reduces_blocks(self.source.shape))
            profiled_kinds = 0 if exact or config.profile is not None else len(self.probed_kinds())
            parameters = plan.stack(self.source.shape).stored_parameters()
            result_bytes = expected_bytes(config.save_dtype, self.source.checkpoint, parameters)
        work = describe_work(
            config,
            self.recipe,
            self.source,
            plan,
            device=self.device,
            dtype=self.dtype,
            profiled_kinds=profiled_kinds,
            exact=exact,
        )
        bounds = current_bounds(config, self.device)
        return predict_footprint(work, bounds, result_bytes=result_bytes, measure_time=dry)

    def make_profile(
        self, config: CompressionConfig, tier: str, *, probed: Sequence[str] = PROBED_KINDS, embedding: bool = True
    ) -> Profile:
        """Walk through the dense model once; `probed` kinds of blocks have their sensitivity measured.

        `embedding`: the embedding's, too, where the output head is that; its probe walks alone behind the others.
        """
        text = self.read_text(config)
        shape, unit = self.source.shape, head_unit(config, self.source.shape)
        profiler = LayerProfiler(
            config,
            self.source,
            unit,
            probed=probed,
            device=self.device,
            dtype=self.dtype,
            scratch=self.scratch,
            tier=tier,
            workers=self.workers,
        )
        profiler.embed(text)
        with ProgressBar(
            num_layers=shape.num_hidden_layers,
            num_tokens=profiler.num_tokens,
            visible=self.show_progress,
            description="profile",
        ) as progress:
            for layer, tensors in enumerate(self._read_layers()):
                profiler.profile_layer(layer, tensors, progress.advance)
                del tensors  # or they would wait for the next layer's
        if embedding and shape.reads_embedding_out:
            tokenizer = load_tokenizer(self.source.checkpoint.folder)
            marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
            profiler.profile_embedding([mark for mark in marks if mark < shape.vocab_size], self._read_layers)
        return profiler.finish(
            ProfileOrigin(
                model_hash=self.source.checkpoint.content_hash(),
                token_hash=text.token_hash,
                head_unit=unit,
                damping=config.fixed_damping,
                probe_tokens=profiler.num_probe_tokens,
                versions=versions(),
            )
        )

    def _read_layers(self) -> Iterator[dict[str, torch.Tensor]]:
        return prefetch(self.source.read_layer, self.source.shape.num_hidden_layers)


def _warn_if_short(calibration: CalibrationSet, shape: ModelShape) -> None:
    wanted = TOKENS_PER_NEURON * shape.intermediate_size
    if calibration.num_tokens < wanted:
        logger.warning(
            "%d calibration tokens are few for an FFN of width %d: the correction will fit the text, not the model; "
            "give at least %d (--num-sequences).",
            calibration.num_tokens,
            shape.intermediate_size,
            wanted,
        )
