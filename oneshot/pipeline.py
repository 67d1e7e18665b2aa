"""The order of the stages: checkpoint -> plan -> calibration -> hidden size -> (per layer) statistics, factors, fold
-> output.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oneshot.arch import LLAMA
from oneshot.calibration import SELF, load_calibration, load_tokenizer, sample_calibration
from oneshot.checkpoint import Checkpoint, CheckpointWriter
from oneshot.config import TOKENS_PER_NEURON, CompressionConfig
from oneshot.errors import ConfigError, DeviceError, OutputError
from oneshot.export.hf import stock_config, verify, write_companions
from oneshot.export.per_layer import per_layer_config, write_modelling_file
from oneshot.fold import fold_embedding, fold_head
from oneshot.footprint import (
    current_bounds,
    describe_work,
    gguf_header,
    load_libraries,
    offload_folder,
    predict_footprint,
    refuse_conversion,
    with_conversion,
)
from oneshot.hidden import StreamSubspaces, Subspaces, principal_subspaces
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
from oneshot.recipes import Recipe, resolve_recipe
from oneshot.records import (
    CalibrationSet,
    Footprint,
    HiddenPlan,
    LayerReport,
    ModelShape,
    Plan,
    Profile,
    ProfileOrigin,
    Report,
    StackShape,
)
from oneshot.report import ProgressBar, Stopwatch, peak_bytes, peak_device_bytes, versions, write_report
from oneshot.source import SourceModel, identify, open_model
from oneshot.stream import prefetch, release_heap, resolve_device, resolve_dtype

logger = logging.getLogger(__name__)

POSITIONS = "model.embed_positions.weight"  # in the per-layer form
SAVED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compress(config: CompressionConfig, *, show_progress: bool = False) -> Report:
    """Compress a checkpoint into `config.output` and return the report that is also written there.

    The result is a stock checkpoint (transformers loads it with no code of ours). Nothing appears at the output before
    it is complete. Same seed, same machine and same thread count give the same bytes.

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
            plan = plan_sizes(one, inputs.recipe, inputs.source.shape, budget=inputs.budget(one))
            inputs.footprint(one, plan)
            _refuse_output(one, inputs.source.checkpoint)
        return [_compress(one, inputs) for one in configs]


def predict(config: CompressionConfig) -> Footprint:
    """What `compress` would take: an upper bound of its memory, its disk, its parameters, roughly its time.

    Reads headers only, no weights and no text, and writes nothing. The plan is that of layers which are all alike; a
    profile may share the same parameters out otherwise, which the bound covers. A `--budget latency` is taken as one
    of FLOPs, because measuring a layer needs its weights.

    Raises as `compress` does for what is known before the first weight is read.
    """
    offload_folder(config)
    with torch.inference_mode():
        header = gguf_header(config.checkpoint)
        source = open_model(config.checkpoint, Path()) if header is None else identify(header)
        inputs = _Inputs(config, Path(), show_progress=False, source=source)
        if header is not None:
            refuse_conversion(config, header, current_bounds(config, inputs.device))
        _refuse_output(config, source.checkpoint)
        unmeasured = replace(config, budget="flops") if config.budget == "latency" else config
        plan = plan_sizes(unmeasured, inputs.recipe, source.shape, budget=inputs.budget(unmeasured))
        if plan.stack(source.shape) != source.shape.stack():
            _output_config(source, plan)
        return with_conversion(inputs.footprint(config, plan, dry=True), header)


def profile(config: CompressionConfig, *, show_progress: bool = False) -> Profile:
    """Profile a checkpoint into the folder `config.output`: the error curves that plans are made from.

    Raises as `compress`.
    """
    output = Path(config.output).expanduser()
    refuse_existing(output)
    with _inputs(config, show_progress) as inputs:
        found = inputs.make_profile(config, inputs.footprint(config, None).tier)
        save_profile(found, output)
        return found


@contextmanager
def _inputs(config: CompressionConfig, show_progress: bool) -> Iterator["_Inputs"]:
    """The inputs of a run, with a scratch folder for as long as it takes."""
    folder = offload_folder(config)
    try:
        scratch = tempfile.TemporaryDirectory(prefix="oneshot-", dir=folder)
    except OSError as error:
        raise OutputError(
            f"Nothing can be written to {folder} ({error.strerror}); name another folder as --offload-dir."
        ) from error
    with scratch as name, torch.inference_mode():
        try:
            yield _Inputs(config, Path(name), show_progress)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceError(
                "The CUDA device is out of memory; lower --batch-size or --sequence-length, or give a smaller "
                "--max-device-memory, for which activations leave it."
            ) from error


class _Inputs:
    """What runs with other targets have in common: the model, the method, the text, the profile. Each is read once."""

    def __init__(
        self, config: CompressionConfig, scratch: Path, show_progress: bool, source: SourceModel | None = None
    ) -> None:
        self.watch = Stopwatch()
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
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        if source is None:
            header = gguf_header(config.checkpoint)
            if header is not None:
                refuse_conversion(config, header, current_bounds(config, self.device))
        self.source = open_model(config.checkpoint, scratch) if source is None else source
        self.scratch, self.show_progress = scratch, show_progress
        self._calibration: CalibrationSet | None = None
        self._profile: Profile | None = None
        self._seconds: Callable[[StackShape], float] | None = None

    def read_text(self, config: CompressionConfig) -> CalibrationSet:
        """The calibration text."""
        if self._calibration is None:
            folder = self.source.checkpoint.folder
            tokenizer = load_tokenizer(folder)
            sizes = {
                "num_sequences": config.num_sequences,
                "sequence_length": config.sequence_length,
                "seed": config.seed,
            }
            if config.calibration == SELF:
                self._calibration = sample_calibration(
                    folder,
                    tokenizer,
                    **sizes,
                    device=self.device,
                    dtype=self.dtype,
                    max_memory_bytes=config.max_memory_bytes,
                )
            else:
                self._calibration = load_calibration(config.calibration, tokenizer, **sizes)
            release_heap()  # tokenising a long text leaves much behind
            _warn_if_short(self._calibration, self.source.shape)
        return self._calibration

    def read_profile(self, config: CompressionConfig, tier: str) -> Profile:
        """The profile given, if it belongs to this model and text, or one made now with activations in `tier`."""
        if self._profile is None:
            if config.profile is not None:
                self._profile = load_profile(Path(config.profile).expanduser())
                model_hash, token_hash = self.source.checkpoint.content_hash(), self.read_text(config).token_hash
                refuse_other(self._profile, config.profile, model_hash=model_hash, token_hash=token_hash)
            else:
                self._profile = self.make_profile(config, tier, probed=self.probed_kinds())
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

    def probed_kinds(self) -> list[str]:
        """The kinds of blocks that shrink, whose sensitivity a profile of this run's own measures."""
        return [kind for kind in ("ffn", "heads") if getattr(self.recipe, kind) != "none"]

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
            result_bytes = _expected_bytes(config.save_dtype, self.source.checkpoint, parameters)
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

    def make_profile(self, config: CompressionConfig, tier: str, *, probed: Sequence[str] = PROBED_KINDS) -> Profile:
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
            tier=tier,
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
    watch, recipe, source, scratch = inputs.watch, inputs.recipe, inputs.source, inputs.scratch
    device, dtype, show_progress = inputs.device, inputs.dtype, inputs.show_progress
    checkpoint, shape = source.checkpoint, source.shape
    output = Path(config.output).expanduser()
    _refuse_output(config, checkpoint)
    budget = inputs.budget(config)
    plan = plan_sizes(config, recipe, shape, budget=budget)
    if plan.stack(shape) != shape.stack():
        _output_config(source, plan)  # refuses what the tier's config cannot hold, before any work
    footprint = inputs.footprint(config, plan)

    with CheckpointWriter(
        output,
        max_shard_bytes=config.max_shard_bytes,
        overwrite=config.overwrite,
        expected_bytes=_expected_bytes(config.save_dtype, checkpoint, plan.stack(shape).stored_parameters()),
    ) as writer:
        calibration, divergences = None, None
        layers_read_text = reads_activations(recipe, plan, shape)
        by_profile = recipe.reads_profile and plan.reduces_blocks(shape)
        if plan.hidden is not None or layers_read_text or by_profile:
            calibration = inputs.read_text(config)
        watch.lap("prepare")
        if by_profile:
            found_profile = inputs.read_profile(config, footprint.tier)
            plan = plan_sizes(config, recipe, shape, profiled_damages(found_profile, recipe.allocation), budget)
            divergences = predicted_divergences(config, recipe, shape, plan, found_profile, budget)
            watch.lap("profile")
        subspaces = None
        if calibration is not None and plan.hidden is not None:
            found = _find_subspaces(inputs, config, calibration, plan.hidden, footprint.tier)
            if config.hidden_size is None and plan.hidden.num_groups > 1:
                plan = spread_hidden_sizes(
                    plan,
                    shape,
                    found.energies,
                    target_parameters=wanted_parameters(config, shape.stack().stored_parameters()),
                    round_to=config.round_to,
                )
            assert plan.hidden is not None
            subspaces = StreamSubspaces(found, plan.hidden, device)
            watch.lap("hidden size")
        compressor = LayerCompressor(
            config, recipe, source, plan, subspaces, device=device, dtype=dtype, scratch=scratch, tier=footprint.tier
        )
        _write_outside(config, source, plan, subspaces, writer)
        text = calibration if layers_read_text else None
        layers = _write_layers(config, compressor, plan.tier, source, text, writer, show_progress)
        writer.finish_weights()
        watch.lap("layers")
        save_dtype = None if config.save_dtype == "keep" else config.save_dtype
        write_companions(checkpoint.folder, writer.partial, _output_config(source, plan), dtype=save_dtype)
        if plan.tier == "per-layer":
            write_modelling_file(writer.partial)
        compressed = verify(writer.partial).num_parameters
        watch.lap("write")
        hidden_error = None if subspaces is None else subspaces.mean_error()
        report = _report(
            config, recipe, source, plan, compressed, calibration, hidden_error, divergences, layers, watch, footprint
        )
        write_report(report, writer.partial)
        writer.commit()
    return report


def _refuse_output(config: CompressionConfig, checkpoint: Checkpoint) -> None:
    """Raise `OutputError` where the result cannot appear at its place."""
    output = Path(config.output).expanduser()
    if checkpoint.folder.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"{output} holds the input checkpoint; choose another --output.")
    if output.exists() and not config.overwrite:
        raise OutputError(f"{output} exists already; choose another --output or add --overwrite.")


def _output_config(source: SourceModel, plan: Plan) -> dict[str, Any]:
    """The config.json of the result; raises `PlanError` where the family's stock config cannot hold it."""
    config, shape, stack = source.checkpoint.config, source.shape, plan.stack(source.shape)
    if plan.tier == "per-layer":
        return per_layer_config(config, shape, stack)
    resized = replace(plan.shape_of_layer(shape, 0), hidden_size=stack.embedding_size)
    return stock_config(source.architecture.resize_config(config, resized), untied=plan.hidden is not None)


def _find_subspaces(
    inputs: _Inputs, config: CompressionConfig, calibration: CalibrationSet, hidden: HiddenPlan, tier: str
) -> Subspaces:
    with ProgressBar(
        num_layers=inputs.source.shape.num_hidden_layers,
        num_tokens=calibration.num_tokens,
        visible=inputs.show_progress,
        description="hidden size",
    ) as progress:
        return principal_subspaces(
            config,
            inputs.source,
            calibration,
            hidden.group_of,
            device=inputs.device,
            dtype=inputs.dtype,
            scratch=inputs.scratch,
            tier=tier,
            advance=progress.advance,
        )


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


def _write_outside(
    config: CompressionConfig,
    source: SourceModel,
    plan: Plan,
    subspaces: StreamSubspaces | None,
    writer: CheckpointWriter,
) -> None:
    """Everything outside the layers: as it is, or folded into the subspaces or the per-layer form."""
    checkpoint, architecture, shape = source.checkpoint, source.architecture, source.shape
    cast = partial(_cast, config.save_dtype)
    if plan.tier == "per-layer" or subspaces is not None:
        bases = None
        if subspaces is not None:
            bases = subspaces.basis(0).cpu(), subspaces.basis(2 * shape.num_hidden_layers).cpu()
        first = None if bases is None else bases[0]
        head = checkpoint.read_one(architecture.embedding)
        writer.add(cast({LLAMA.embedding: fold_embedding(head, first, centred=shape.norm_bias)}))
        positions = source.read_positions()
        if positions is not None:
            writer.add(cast({POSITIONS: fold_embedding(positions, first, centred=shape.norm_bias)}))
        if not shape.tied:
            head = checkpoint.read_one(architecture.output_head)
        norm = checkpoint.read_one(f"{architecture.final_norm}.weight")
        norm_bias = checkpoint.read_one(f"{architecture.final_norm}.bias") if shape.norm_bias else None
        writer.add(cast(fold_head(head, norm, norm_bias, bases, keep_tied=plan.stack(shape).head != "own")))
        return
    prefixes = tuple(architecture.layer_prefix(layer) for layer in range(shape.num_hidden_layers))
    for name in sorted(name for name in checkpoint.tensor_names if not name.startswith(prefixes)):
        writer.add(cast(checkpoint.read([name])))


def _write_layers(
    config: CompressionConfig,
    compressor: LayerCompressor,
    tier: str,
    source: SourceModel,
    calibration: CalibrationSet | None,
    writer: CheckpointWriter,
    show_progress: bool,
) -> list[LayerReport]:
    """Stream the layers through the compressor into the writer."""
    num_layers, architecture, stock = source.shape.num_hidden_layers, source.architecture, tier == "stock"
    if calibration is not None:
        compressor.embed(calibration)
    layers = []
    num_tokens = calibration.num_tokens if calibration is not None else 1
    with ProgressBar(num_layers=num_layers, num_tokens=num_tokens, visible=show_progress) as progress:
        for layer, tensors in enumerate(prefetch(source.read_layer, num_layers)):
            started = time.perf_counter()
            folded, blocks = compressor.compress_layer(layer, tensors, progress.advance)
            prefix = architecture.layer_prefix(layer) if stock else LLAMA.layer_prefix(layer)
            named = architecture.to_own_names(folded) if stock else folded
            writer.add(_cast(config.save_dtype, {prefix + name: tensor for name, tensor in named.items()}))
            layers.append(
                LayerReport(layer, tuple(blocks), time.perf_counter() - started, peak_bytes(), peak_device_bytes())
            )
            progress.layer_done(layers[-1])
            del tensors, folded, named  # or they would wait for the next layer's
    compressor.close()
    return layers


def _cast(save_dtype: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if save_dtype == "keep":
        return tensors
    return {
        name: tensor.to(SAVED_DTYPES[save_dtype]) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _expected_bytes(save_dtype: str, checkpoint: Checkpoint, parameters: int) -> int:
    """Bytes that weight files of so many parameters will take, to the size of their headers."""
    if save_dtype != "keep":
        return parameters * SAVED_DTYPES[save_dtype].itemsize
    return round(checkpoint.num_bytes * parameters / checkpoint.num_parameters)


def _report(
    config: CompressionConfig,
    recipe: Recipe,
    source: SourceModel,
    plan: Plan,
    compressed: int,
    calibration: CalibrationSet | None,
    hidden_error: float | None,
    divergences: dict[str, float] | None,
    layers: list[LayerReport],
    watch: Stopwatch,
    footprint: Footprint,
) -> Report:
    dense = source.checkpoint.num_parameters
    stacks = {"dense": source.shape.stack(), "compressed": plan.stack(source.shape)}
    asked = config.sparsity if config.params is None else 1 - config.params / dense
    return Report(
        config=config.to_dict(),
        recipe=asdict(recipe),
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
        seconds=watch.total(),
        peak_bytes=peak_bytes(),
        peak_device_bytes=peak_device_bytes(),
        hidden_error=hidden_error,
        predicted_divergence=divergences,
        footprint=footprint,
    )
