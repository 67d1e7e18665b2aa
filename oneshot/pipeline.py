"""The order of the stages: checkpoint -> plan -> calibration -> hidden size -> (per layer) statistics, factors, fold
-> output.
"""

import logging
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from oneshot.calibration import load_calibration, load_tokenizer
from oneshot.checkpoint import Checkpoint, CheckpointWriter
from oneshot.config import CompressionConfig
from oneshot.errors import DeviceError, OutputError
from oneshot.export.hf import verify_stock, write_companions
from oneshot.hidden import hidden_subspace, project_model
from oneshot.layerwise import LayerCompressor
from oneshot.plan import plan_sizes
from oneshot.recipes import Recipe, resolve_recipe
from oneshot.records import CalibrationSet, LayerReport, ModelShape, Plan, Report
from oneshot.report import ProgressBar, Stopwatch, peak_bytes, peak_device_bytes, versions, write_report
from oneshot.source import SourceModel, open_model
from oneshot.stream import prefetch, resolve_device, resolve_dtype

logger = logging.getLogger(__name__)

TOKENS_PER_NEURON = 4
SAVED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compress(config: CompressionConfig, *, show_progress: bool = False) -> Report:
    """Compress a checkpoint into `config.output` and return the report that is also written there.

    The result is a stock checkpoint (transformers loads it with no code of ours). Nothing appears at the output before
    it is complete. Same seed, same machine and same thread count give the same bytes.

    Raises a subclass of `OneshotError` with one sentence for everything that a user can mend.
    """
    with tempfile.TemporaryDirectory(prefix="oneshot-") as scratch, torch.inference_mode():
        try:
            return _compress(config, Path(scratch), show_progress)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceError(
                "The CUDA device is out of memory; lower --batch-size or --sequence-length, or give --max-memory."
            ) from error


def _compress(config: CompressionConfig, scratch: Path, show_progress: bool) -> Report:
    watch = Stopwatch()
    recipe = resolve_recipe(
        config.recipe,
        ffn=config.ffn,
        heads=config.heads,
        correction=config.correction,
        pivoting=config.pivoting,
        sketch=config.sketch,
        hidden=config.hidden,
    )
    device = resolve_device(config.device)
    sparsity = config.sparsity or 0.0
    source = open_model(config.checkpoint, scratch)
    checkpoint, architecture, shape = source.checkpoint, source.architecture, source.shape
    output = Path(config.output).expanduser()
    if checkpoint.folder.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"{output} holds the input checkpoint; choose another --output.")
    target = config.params if config.params is not None else round(checkpoint.num_parameters * (1 - sparsity))
    narrow, plan = plan_sizes(
        config, recipe, shape, dense_parameters=checkpoint.num_parameters, target_parameters=target
    )
    compressed_shape = plan.apply(narrow)
    compressed_config = architecture.resize_config(checkpoint.config, compressed_shape)
    if narrow != shape:
        compressed_config |= {"tie_word_embeddings": False}
    save_dtype = None if config.save_dtype == "keep" else config.save_dtype

    with CheckpointWriter(
        output,
        max_shard_bytes=config.max_shard_bytes,
        overwrite=config.overwrite,
        expected_bytes=_expected_bytes(config.save_dtype, checkpoint, target),
    ) as writer:
        calibration = None
        if recipe.reads_activations and compressed_shape != shape:
            calibration = load_calibration(
                config.calibration,
                load_tokenizer(checkpoint.folder),
                num_sequences=config.num_sequences,
                sequence_length=config.sequence_length,
                seed=config.seed,
            )
            _warn_if_short(calibration, shape)
        watch.lap("prepare")
        hidden_error = None
        if calibration is not None and narrow != shape:
            source, hidden_error = _narrow(
                config, source, calibration, narrow.hidden_size, device, scratch, show_progress
            )
            watch.lap("hidden size")
        layers = _write_weights(config, recipe, source, plan, calibration, device, writer, scratch, show_progress)
        writer.finish_weights()
        watch.lap("layers")
        write_companions(checkpoint.folder, writer.partial, compressed_config, dtype=save_dtype)
        compressed = verify_stock(writer.partial).num_parameters
        watch.lap("write")
        report = _report(
            config, recipe, checkpoint, shape, compressed_shape, compressed, calibration, hidden_error, layers, watch
        )
        write_report(report, writer.partial)
        writer.commit()
    return report


def _narrow(
    config: CompressionConfig,
    source: SourceModel,
    calibration: CalibrationSet,
    hidden_size: int,
    device: torch.device,
    scratch: Path,
    show_progress: bool,
) -> tuple[SourceModel, float]:
    """The model with a smaller hidden size, in the scratch folder, and what it leaves out of the residual stream."""
    with ProgressBar(
        num_layers=source.shape.num_hidden_layers,
        num_tokens=calibration.num_tokens,
        visible=show_progress,
        description="hidden size",
    ) as progress:
        subspace = hidden_subspace(
            config,
            source,
            calibration,
            hidden_size,
            device=device,
            dtype=resolve_dtype(config.dtype, device),
            scratch=scratch,
            advance=progress.advance,
        )
    folder = scratch / "narrow"
    project_model(source, subspace.basis, folder, max_shard_bytes=config.max_shard_bytes)
    return open_model(str(folder), scratch), subspace.relative_error


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


def _write_weights(
    config: CompressionConfig,
    recipe: Recipe,
    source: SourceModel,
    plan: Plan,
    calibration: CalibrationSet | None,
    device: torch.device,
    writer: CheckpointWriter,
    scratch: Path,
    show_progress: bool,
) -> list[LayerReport]:
    """Stream the layers through the compressor into the writer; everything outside the layers passes through."""
    checkpoint, architecture, shape = source.checkpoint, source.architecture, source.shape
    prefixes = [architecture.layer_prefix(layer) for layer in range(shape.num_hidden_layers)]
    outside = sorted(name for name in checkpoint.tensor_names if not name.startswith(tuple(prefixes)))
    cast = partial(_cast, config.save_dtype)
    for name in outside:
        writer.add(cast(checkpoint.read([name])))

    compressor = LayerCompressor(
        config,
        recipe,
        checkpoint.config,
        architecture,
        shape,
        plan,
        device=device,
        dtype=resolve_dtype(config.dtype, device),
        scratch=scratch,
    )
    if calibration is not None and plan.apply(shape) != shape:
        compressor.embed(calibration, checkpoint.read_one(architecture.embedding))
    layers = []
    num_tokens = calibration.num_tokens if calibration is not None else 1
    load = partial(_load_layer, checkpoint, prefixes)
    with ProgressBar(num_layers=len(prefixes), num_tokens=num_tokens, visible=show_progress) as progress:
        for layer, tensors in enumerate(prefetch(load, len(prefixes))):
            started = time.perf_counter()
            folded, blocks = compressor.compress_layer(tensors, progress.advance)
            writer.add(cast({prefixes[layer] + name: tensor for name, tensor in folded.items()}))
            layers.append(
                LayerReport(layer, tuple(blocks), time.perf_counter() - started, peak_bytes(), peak_device_bytes())
            )
            progress.layer_done(layers[-1])
            del tensors, folded  # or they would wait for the next layer's
    compressor.close()
    return layers


def _load_layer(checkpoint: Checkpoint, prefixes: list[str], layer: int) -> dict[str, torch.Tensor]:
    with torch.inference_mode():  # the mode is per thread, and this runs in the prefetching one
        return checkpoint.read_prefix(prefixes[layer])


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
    checkpoint: Checkpoint,
    shape: ModelShape,
    compressed_shape: ModelShape,
    compressed: int,
    calibration: CalibrationSet | None,
    hidden_error: float | None,
    layers: list[LayerReport],
    watch: Stopwatch,
) -> Report:
    dense = checkpoint.num_parameters
    block = {"dense": shape, "compressed": compressed_shape}
    block_parameters = {name: size.num_hidden_layers * size.layer_parameters() for name, size in block.items()}
    asked = config.sparsity if config.sparsity is not None else 1 - (config.params or dense) / dense
    return Report(
        config=config.to_dict(),
        recipe=asdict(recipe),
        versions=versions(),
        dense_shape=asdict(shape),
        compressed_shape=asdict(compressed_shape),
        stored_parameters={"dense": dense, "compressed": compressed},
        block_parameters=block_parameters,
        flops_per_token={name: size.flops_per_token() for name, size in block.items()},
        kv_bytes_per_token={name: size.kv_bytes_per_token() for name, size in block.items()},
        sparsity={"asked": asked, "reached": 1 - compressed / dense},
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
    )
