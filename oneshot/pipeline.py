"""The order of the stages: checkpoint -> plan -> calibration -> hidden size -> (per layer) statistics, factors, fold
-> output.
"""

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from oneshot.arch import LLAMA, Architecture
from oneshot.calibration import SELF, load_calibration, load_tokenizer, sample_calibration
from oneshot.checkpoint import Checkpoint
from oneshot.config import TOKENS_PER_NEURON, CompressionConfig
from oneshot.errors import ConfigError, DeviceError, OutputError
from oneshot.export.hf import stock_config, verify, write_companions
from oneshot.export.per_layer import per_layer_config, write_modelling_file
from oneshot.fold import fold_embedding, fold_head
from oneshot.hidden import StreamSubspaces, principal_subspaces
from oneshot.layerwise import PROBED_KINDS, LayerCompressor, LayerProfiler, measured_seconds, reads_activations
from oneshot.plan import (
    Budget,
    head_unit,
    plan_sizes,
    predicted_divergences,
    profiled_damages,
    spread_hidden_sizes,
    wanted_parameters,
)
from oneshot.profiles import load_profile, refuse_existing, refuse_other, save_profile
from oneshot.recipes import resolve_recipe
from oneshot.records import (
    CalibrationSet,
    LayerReport,
    ModelShape,
    Plan,
    Profile,
    ProfileOrigin,
    Report,
    StackShape,
)
from oneshot.report import (
    REPORT_NAME,
    ProgressBar,
    Stopwatch,
    WarningLog,
    peak_bytes,
    peak_device_bytes,
    versions,
    write_report,
)
from oneshot.source import SourceModel, identify, resolve_checkpoint
from oneshot.stream import prefetch, resolve_device, resolve_dtype
from oneshot.workers import join_workers
from oneshot.writer import CheckpointWriter, refuse_output

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]

POSITIONS = "model.embed_positions.weight"  # in the per-layer form
# Options that say where things are and what may be done, not what comes out.
SHAPELESS = ("checkpoint", "output", "calibration", "device", "dtype", "max_memory_bytes", "overwrite", "resume")
SAVED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compress(config: CompressionConfig, *, show_progress: bool = False) -> Report:
    """Compress a checkpoint into `config.output` and return the report that is also written there.

    The result is a stock checkpoint (transformers loads it with no code of ours). Nothing appears at the output before
    it is complete. Same seed, same machine and same thread count give the same bytes, also where a run was interrupted
    and another went on with `config.resume`.

    Raises a subclass of `OneshotError` with one sentence for everything that a user can mend.
    """
    with _inputs(config, show_progress) as inputs:
        return _compress(config, inputs)


def compress_sizes(
    config: CompressionConfig, sparsities: Sequence[float], *, show_progress: bool = False
) -> list[Report]:
    """As `compress`, once for every sparsity, into `OUT/sparsity-0.10` and so on; what they share is done once.

    All targets are planned before the first run, so that one out of reach is refused before any work.
    """
    configs = [
        replace(config, sparsity=sparsity, output=str(Path(config.output) / f"sparsity-{sparsity:.2f}"))
        for sparsity in sparsities
    ]
    if len({one.output for one in configs}) < len(configs):
        raise ConfigError("Two of the --sparsity values are equal to two decimals; give each once.")
    with _inputs(config, show_progress) as inputs:
        for one in configs:
            plan_sizes(one, inputs.recipe, inputs.source.shape, budget=inputs.budget(one))
            refuse_output(Path(one.output).expanduser(), overwrite=one.overwrite, resume=one.resume)
        return [_compress(one, inputs) for one in configs]


def profile(config: CompressionConfig, *, show_progress: bool = False) -> Profile:
    """Profile a checkpoint into the folder `config.output`: the error curves that plans are made from.

    Raises as `compress`.
    """
    output = Path(config.output).expanduser()
    refuse_existing(output)
    with _inputs(config, show_progress) as inputs:
        found = inputs.make_profile(config)
        if inputs.workers.is_main:
            save_profile(found, output)
        return found


@contextmanager
def _inputs(config: CompressionConfig, show_progress: bool) -> Iterator["_Inputs"]:
    """The inputs of a run, with a scratch folder for as long as it takes."""
    with tempfile.TemporaryDirectory(prefix="oneshot-") as scratch, torch.inference_mode():
        try:
            inputs = _Inputs(config, Path(scratch), show_progress)
            with inputs.warnings:
                yield inputs
            inputs.workers.wait()  # the others may be reading what lies in this one's scratch folder
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceError(
                "The CUDA device is out of memory; lower --batch-size or --sequence-length, or give --max-memory."
            ) from error


class _Inputs:
    """What runs with other targets have in common: the model, the method, the text, the profile. Each is read once."""

    def __init__(self, config: CompressionConfig, scratch: Path, show_progress: bool) -> None:
        self.watch, self.warnings = Stopwatch(), WarningLog()
        self.recipe = resolve_recipe(
            config.recipe,
            ffn=config.ffn,
            heads=config.heads,
            correction=config.correction,
            pivoting=config.pivoting,
            sketch=config.sketch,
            hidden=config.hidden,
            tier=config.tier,
            group_size=config.group_size,
            allocation=config.allocation,
        )
        self.workers = join_workers(on_cpu=resolve_device(config.device).type == "cpu")
        self.device = resolve_device(config.device, self.workers.local_rank if self.workers.size > 1 else None)
        self.dtype = resolve_dtype(config.dtype, self.device)
        folder = self.workers.share(0, lambda: resolve_checkpoint(config.checkpoint, scratch))
        self.source = identify(Checkpoint(folder))
        self.scratch, self.show_progress = scratch, show_progress and self.workers.is_main
        self._calibration: CalibrationSet | None = None
        self._profile: Profile | None = None
        self._seconds: Callable[[StackShape], float] | None = None

    def read_text(self, config: CompressionConfig) -> CalibrationSet:
        """The calibration text: all of it, in every process."""
        if self._calibration is None:
            self._calibration = self.workers.share(0, lambda: self._load_text(config))
            _warn_if_short(self._calibration, self.source.shape)
        return self._calibration

    def _load_text(self, config: CompressionConfig) -> CalibrationSet:
        folder = self.source.checkpoint.folder
        tokenizer = load_tokenizer(folder)
        sizes = {
            "num_sequences": config.num_sequences,
            "sequence_length": config.sequence_length,
            "seed": config.seed,
        }
        if config.calibration == SELF:
            return sample_calibration(
                folder,
                tokenizer,
                **sizes,
                device=self.device,
                dtype=self.dtype,
                max_memory_bytes=config.max_memory_bytes,
            )
        return load_calibration(config.calibration, tokenizer, **sizes)

    def read_profile(self, config: CompressionConfig) -> Profile:
        """The profile given, if it belongs to this model and text, or one made now."""
        if self._profile is None:
            if config.profile is not None:
                self._profile = load_profile(Path(config.profile).expanduser())
                model_hash, token_hash = self.source.checkpoint.content_hash(), self.read_text(config).token_hash
                refuse_other(self._profile, config.profile, model_hash=model_hash, token_hash=token_hash)
            else:
                reduced = [kind for kind in ("ffn", "heads") if getattr(self.recipe, kind) != "none"]
                self._profile = self.make_profile(config, probed=reduced)
        return self._profile

    def budget(self, config: CompressionConfig) -> Budget:
        """What `config.sparsity` asks for, in the units of `config.budget`."""
        checkpoint, shape = self.source.checkpoint, self.source.shape
        if config.budget == "parameters":
            return Budget(wanted_parameters(config, shape.stack().stored_parameters()))
        kept = 1 - (config.sparsity or 0.0)
        if config.budget == "bytes":
            each = _expected_bytes(config.save_dtype, checkpoint, 10**9) / 10**9
            return Budget(kept * checkpoint.num_bytes, lambda stack: each * stack.stored_parameters(), "bytes")
        if config.budget == "flops":
            return Budget(kept * shape.stack().flops_per_token(), StackShape.flops_per_token, "FLOPs per token")
        if self._seconds is None:
            self._seconds = measured_seconds(
                self.source, sequence_length=config.sequence_length, device=self.device, dtype=self.dtype
            )
        return Budget(kept * self._seconds(shape.stack()), self._seconds, "seconds")

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

    def make_profile(self, config: CompressionConfig, *, probed: Sequence[str] = PROBED_KINDS) -> Profile:
        """Walk through the dense model once; `probed` kinds of blocks have their sensitivity measured."""
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
            workers=self.workers,
        )
        profiler.embed(text)
        with ProgressBar(
            num_layers=shape.num_hidden_layers,
            num_tokens=profiler.num_tokens,
            visible=self.show_progress,
            description="profile",
        ) as progress:
            for layer, tensors in enumerate(prefetch(self.source.read_layer, shape.num_hidden_layers)):
                profiler.profile_layer(layer, tensors, progress.advance)
                del tensors  # or they would wait for the next layer's
        return profiler.finish(
            ProfileOrigin(
                model_hash=self.source.checkpoint.content_hash(),
                token_hash=text.token_hash,
                head_unit=unit,
                damping=config.damping,
                probe_tokens=profiler.num_probe_tokens,
                versions=versions(),
            )
        )


def _compress(config: CompressionConfig, inputs: _Inputs) -> Report:
    watch, recipe, source, workers = inputs.watch, inputs.recipe, inputs.source, inputs.workers
    checkpoint, shape = source.checkpoint, source.shape
    output = Path(config.output).expanduser()
    if checkpoint.folder.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"{output} holds the input checkpoint; choose another --output.")
    refuse_output(output, overwrite=config.overwrite, resume=config.resume)
    budget = inputs.budget(config)
    plan = workers.share(0, lambda: plan_sizes(config, recipe, shape, budget=budget))
    if plan.stack(shape) != shape.stack():
        _output_config(source, plan)  # refuses what the tier's config cannot hold, before any work
    layers_read_text = reads_activations(recipe, plan, shape)
    by_profile = recipe.reads_profile and plan.reduces_blocks(shape)
    calibration = None
    if plan.hidden is not None or layers_read_text or by_profile:
        calibration = inputs.read_text(config)
    fingerprint = inputs.fingerprint(config, calibration)
    if config.resume and output.exists():
        finished = _finished_report(output, fingerprint)
        if finished is not None:
            return finished
        refuse_output(output, overwrite=config.overwrite, resume=False)
    workers.wait()  # until all have looked, before one of them writes
    watch.lap("prepare")

    outside = _outside(source, plan)
    with ExitStack() as stack:
        writer = None
        if workers.is_main:
            writer = stack.enter_context(
                CheckpointWriter(
                    output,
                    num_shards=shape.num_hidden_layers + len(outside),
                    fingerprint=fingerprint,
                    overwrite=config.overwrite,
                    resume=config.resume,
                    expected_bytes=_expected_bytes(
                        config.save_dtype, checkpoint, plan.stack(shape).stored_parameters()
                    ),
                )
            )
        plan, divergences = _plan_by_measurement(config, inputs, plan, budget, by_profile, writer)
        plan, subspaces = _find_subspaces(config, inputs, plan, calibration)
        compressor = LayerCompressor(
            config,
            recipe,
            source,
            plan,
            subspaces,
            device=inputs.device,
            dtype=inputs.dtype,
            scratch=inputs.scratch,
            workers=workers,
        )
        warnings = inputs.warnings.take()
        text = calibration if layers_read_text else None
        layers = _write_layers(config, inputs, compressor, plan.tier, text, writer)
        watch.lap("layers")
        report = None
        if writer is not None:
            for read in outside[writer.num_finished - shape.num_hidden_layers :]:
                writer.add(_cast(config.save_dtype, read(subspaces)))
            compressed = _finish_folder(config, source, plan, writer)
            watch.lap("write")
            hidden_error = None if subspaces is None else subspaces.mean_error()
            report = _report(
                config, inputs, plan, compressed, calibration, hidden_error, divergences, layers, fingerprint
            )
            report = replace(report, warnings=warnings + inputs.warnings.take())
            write_report(report, writer.partial)
            writer.commit()
        shared = workers.share(0, lambda: report)
    assert shared is not None
    return shared


def _finish_folder(config: CompressionConfig, source: SourceModel, plan: Plan, writer: CheckpointWriter) -> int:
    """Everything beside the weights; the stored parameters of the checkpoint, which a model class would load now."""
    writer.finish_weights()
    save_dtype = None if config.save_dtype == "keep" else config.save_dtype
    write_companions(source.checkpoint.folder, writer.partial, _output_config(source, plan), dtype=save_dtype)
    if plan.tier == "per-layer":
        write_modelling_file(writer.partial)
    return verify(writer.partial).num_parameters


def _finished_report(output: Path, fingerprint: dict[str, Any]) -> Report | None:
    """The report of a finished run with this fingerprint; None where the output is another run's."""
    path = output / REPORT_NAME
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    return Report.from_dict(values) if values.get("fingerprint") == fingerprint else None


def _plan_by_measurement(
    config: CompressionConfig,
    inputs: _Inputs,
    plan: Plan,
    budget: Budget,
    by_profile: bool,
    writer: CheckpointWriter | None,
) -> tuple[Plan, dict[str, float] | None]:
    """The plan, made from a profile where the recipe wants that, and the divergences that the profile predicts.

    What was measured is kept: a profile takes long, and latencies would differ the next time.
    """
    kept = inputs.workers.share(0, lambda: None if writer is None else writer.kept("plan"))
    if kept is not None:
        return Plan.from_dict(kept["plan"]), kept["divergences"]
    divergences = None
    if by_profile:
        shape, recipe = inputs.source.shape, inputs.recipe
        found = inputs.read_profile(config)
        damages = profiled_damages(found, recipe.allocation)
        plan = inputs.workers.share(0, lambda: plan_sizes(config, recipe, shape, damages, budget))
        divergences = predicted_divergences(config, recipe, shape, plan, found, budget)
        inputs.watch.lap("profile")
    if writer is not None and (by_profile or config.budget == "latency"):
        writer.keep("plan", {"plan": asdict(plan), "divergences": divergences})
    return plan, divergences


def _output_config(source: SourceModel, plan: Plan) -> dict[str, Any]:
    """The config.json of the result; raises `PlanError` where the family's stock config cannot hold it."""
    config, shape, stack = source.checkpoint.config, source.shape, plan.stack(source.shape)
    if plan.tier == "per-layer":
        return per_layer_config(config, shape, stack)
    resized = replace(plan.shape_of_layer(shape, 0), hidden_size=stack.embedding_size)
    return stock_config(source.architecture.resize_config(config, resized), untied=plan.hidden is not None)


def _find_subspaces(
    config: CompressionConfig, inputs: _Inputs, plan: Plan, calibration: CalibrationSet | None
) -> tuple[Plan, StreamSubspaces | None]:
    """The subspaces of a smaller hidden size, and the plan with the sizes that suit them."""
    if plan.hidden is None or calibration is None:
        return plan, None
    shape = inputs.source.shape
    with ProgressBar(
        num_layers=shape.num_hidden_layers,
        num_tokens=calibration.num_tokens,
        visible=inputs.show_progress,
        description="hidden size",
    ) as progress:
        found = principal_subspaces(
            config,
            inputs.source,
            calibration,
            plan.hidden.group_of,
            device=inputs.device,
            dtype=inputs.dtype,
            scratch=inputs.scratch,
            advance=progress.advance,
            workers=inputs.workers,
        )
    if config.hidden_size is None and plan.hidden.num_groups > 1:
        plan = spread_hidden_sizes(
            plan,
            shape,
            found.energies,
            target_parameters=wanted_parameters(config, shape.stack().stored_parameters()),
            round_to=config.round_to,
        )
    assert plan.hidden is not None
    inputs.watch.lap("hidden size")
    return plan, StreamSubspaces(found, plan.hidden, inputs.device)


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


def _outside(source: SourceModel, plan: Plan) -> list[Callable[[StreamSubspaces | None], Tensors]]:
    """Readers of what is outside the layers, a shard each: as it is, or folded into subspaces or the per-layer form."""
    checkpoint, architecture, shape = source.checkpoint, source.architecture, source.shape

    def embeddings(subspaces: StreamSubspaces | None) -> Tensors:
        first = None if subspaces is None else subspaces.basis(0).cpu()
        folded = fold_embedding(checkpoint.read_one(architecture.embedding), first, centred=shape.norm_bias)
        positions = source.read_positions()
        if positions is None:
            return {LLAMA.embedding: folded}
        return {LLAMA.embedding: folded, POSITIONS: fold_embedding(positions, first, centred=shape.norm_bias)}

    def head(subspaces: StreamSubspaces | None) -> Tensors:
        bases = None
        if subspaces is not None:
            bases = subspaces.basis(0).cpu(), subspaces.basis(2 * shape.num_hidden_layers).cpu()
        weight = checkpoint.read_one(architecture.embedding if shape.tied else architecture.output_head)
        norm = checkpoint.read_one(f"{architecture.final_norm}.weight")
        norm_bias = checkpoint.read_one(f"{architecture.final_norm}.bias") if shape.norm_bias else None
        return fold_head(weight, norm, norm_bias, bases, keep_tied=plan.stack(shape).head != "own")

    if plan.tier == "per-layer" or plan.hidden is not None:
        return [embeddings, head]
    prefixes = tuple(architecture.layer_prefix(layer) for layer in range(shape.num_hidden_layers))
    names = {name for name in checkpoint.tensor_names if not name.startswith(prefixes)}
    parts = (sorted(names - {architecture.output_head}), sorted(names & {architecture.output_head}))

    def as_they_are(part: list[str]) -> Callable[[StreamSubspaces | None], Tensors]:
        return lambda _: checkpoint.read(part)

    return [as_they_are(part) for part in parts if part]


def _write_layers(
    config: CompressionConfig,
    inputs: _Inputs,
    compressor: LayerCompressor,
    tier: str,
    text: CalibrationSet | None,
    writer: CheckpointWriter | None,
) -> list[LayerReport]:
    """Stream the layers through the compressor into the writer; those of an interrupted run are there already.

    Only one of several processes has a writer.
    """
    num_layers = inputs.source.shape.num_hidden_layers
    own = inputs.source.architecture if tier == "stock" else LLAMA  # whose names the checkpoint takes
    workers = inputs.workers
    finished = workers.share(0, lambda: min(writer.num_finished, num_layers) if writer is not None else 0)
    layers = [] if writer is None else [LayerReport.from_dict(writer.record(layer)) for layer in range(finished)]
    if finished == num_layers:
        return layers
    if text is not None:
        compressor.embed(text)
    num_tokens = text.num_tokens if text is not None else 1
    with ProgressBar(num_layers=num_layers, num_tokens=num_tokens, visible=inputs.show_progress) as progress:
        for layer, tensors in enumerate(prefetch(inputs.source.read_layer, num_layers)):
            if layer < finished:
                stored, scaffold = workers.share(0, lambda: writer.reread(layer) if writer is not None else ({}, {}))  # noqa: B023
                working = scaffold or _llama_layer(stored, layer, own)
                compressor.replay_layer(layer, tensors, working, progress.advance)
                continue
            started = time.perf_counter()
            done = compressor.compress_layer(layer, tensors, progress.advance)
            named = {own.layer_prefix(layer) + name: value for name, value in own.to_own_names(done.folded).items()}
            saved = _cast(config.save_dtype, named)
            layers.append(
                LayerReport(
                    layer,
                    tuple(done.reports),
                    time.perf_counter() - started,
                    peak_bytes(),
                    peak_device_bytes(),
                    inputs.warnings.take(),
                )
            )
            if writer is not None:
                folded = not _same(_llama_layer(saved, layer, own), done.working)
                writer.add(saved, record=asdict(layers[-1]), scaffold=done.working if folded else None)
            progress.layer_done(layers[-1])
            del tensors, done, named, saved  # or they would wait for the next layer's
    compressor.close()
    return layers


def _llama_layer(tensors: Tensors, layer: int, own: Architecture) -> Tensors:
    """A layer of a checkpoint under Llama's names, without the layer's."""
    prefix = own.layer_prefix(layer)
    return own.to_llama_names({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})


def _same(stored: Tensors, working: Tensors) -> bool:
    """Whether the streams ran through exactly what is stored."""
    return stored.keys() == working.keys() and all(
        stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor.cpu())
        for name, tensor in working.items()
    )


def _cast(save_dtype: str, tensors: Tensors) -> Tensors:
    """The tensors in the dtype that is saved; what lies beyond its range becomes its largest value, with a warning."""
    if save_dtype == "keep":
        return tensors
    dtype = SAVED_DTYPES[save_dtype]
    largest = torch.finfo(dtype).max
    cast = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            cast[name] = tensor
            continue
        beyond = int(((tensor.abs() > largest) & tensor.isfinite()).sum())
        if beyond:
            logger.warning("%s has %d values beyond the range of %s; they are clamped.", name, beyond, save_dtype)
            tensor = torch.where(tensor.isfinite(), tensor.clamp(-largest, largest), tensor)
        cast[name] = tensor.to(dtype)
    return cast


def _expected_bytes(save_dtype: str, checkpoint: Checkpoint, parameters: int) -> int:
    """Bytes that weight files of so many parameters will take, to the size of their headers."""
    if save_dtype != "keep":
        return parameters * SAVED_DTYPES[save_dtype].itemsize
    return round(checkpoint.num_bytes * parameters / checkpoint.num_parameters)


def _report(
    config: CompressionConfig,
    inputs: _Inputs,
    plan: Plan,
    compressed: int,
    calibration: CalibrationSet | None,
    hidden_error: float | None,
    divergences: dict[str, float] | None,
    layers: list[LayerReport],
    fingerprint: dict[str, Any],
) -> Report:
    source = inputs.source
    dense = source.checkpoint.num_parameters
    stacks = {"dense": source.shape.stack(), "compressed": plan.stack(source.shape)}
    asked = config.sparsity if config.params is None else 1 - config.params / dense
    return Report(
        config=config.to_dict(),
        recipe=asdict(inputs.recipe),
        versions=versions(),
        plan=asdict(plan),
        stored_parameters={"dense": dense, "compressed": compressed},
        block_parameters={name: stack.block_parameters() for name, stack in stacks.items()},
        flops_per_token={name: stack.flops_per_token() for name, stack in stacks.items()},
        kv_bytes_per_token={name: stack.kv_bytes_per_token() for name, stack in stacks.items()},
        sparsity={"asked": asked, "reached": 1 - compressed / dense},
        dense_shape=asdict(source.shape),
        calibration=None
        if calibration is None
        else {
            "source": calibration.source,
            "num_sequences": len(calibration.token_ids),
            "sequence_length": calibration.token_ids.shape[1],
            "num_tokens": calibration.num_tokens,
            "token_hash": calibration.token_hash,
        },
        layers=tuple(layers),
        seconds=inputs.watch.total(),
        peak_bytes=peak_bytes(),
        peak_device_bytes=peak_device_bytes(),
        hidden_error=hidden_error,
        predicted_divergence=divergences,
        fingerprint=fingerprint,
    )
