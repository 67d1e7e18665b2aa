"""Every layer through the compressor into a shard of its own; those of an interrupted run are there already."""

import time
from dataclasses import asdict
from functools import partial

import torch

from oneshot.arch import LLAMA, Architecture
from oneshot.config import CompressionConfig
from oneshot.embedding import expanded
from oneshot.inputs import Inputs
from oneshot.layerwise import LayerCompressor
from oneshot.records import CalibrationSet, LayerReport, Plan
from oneshot.report import ProgressBar, peak_bytes, peak_device_bytes
from oneshot.result import cast
from oneshot.stream import prefetch
from oneshot.writer import CheckpointWriter

Tensors = dict[str, torch.Tensor]

EMBEDDING = "embedding"  # under which the writer keeps it


def write_layers(
    config: CompressionConfig,
    inputs: Inputs,
    compressor: LayerCompressor,
    plan: Plan,
    text: CalibrationSet | None,
    writer: CheckpointWriter | None,
) -> list[LayerReport]:
    """Stream the layers through the compressor into the writer; those of an interrupted run are there already.

    Only one of several processes has a writer.
    """
    num_layers = inputs.source.shape.num_hidden_layers
    own = inputs.source.architecture if plan.tier == "stock" else LLAMA  # whose names the checkpoint takes
    prefixes = {layer: own.layer_prefix(number) for number, layer in enumerate(plan.kept_layers)}
    workers = inputs.workers
    finished = workers.share(0, lambda: min(writer.num_finished, num_layers) if writer is not None else 0)
    layers = [] if writer is None else [LayerReport.from_dict(writer.record(layer)) for layer in range(finished)]
    if finished == num_layers:
        return layers
    if text is not None:
        compressed = workers.share(0, lambda: _compressed_embedding(writer, plan, inputs.source.shape.hidden_size))
        compressor.embed(text, compressed)
        del compressed
    num_tokens = text.num_tokens if text is not None else 1
    with ProgressBar(num_layers=num_layers, num_tokens=num_tokens, visible=inputs.show_progress) as progress:
        for layer, tensors in enumerate(prefetch(inputs.source.read_layer, num_layers)):
            if layer < finished:
                stored, scaffold = workers.share(0, partial(_reread, writer, layer))
                working = scaffold or _llama_layer(stored, prefixes.get(layer, ""), own)
                compressor.replay_layer(layer, tensors, working, progress.advance)
                continue
            started = time.perf_counter()
            done = compressor.compress_layer(layer, tensors, progress.advance)
            prefix = prefixes.get(layer, "")
            named = {prefix + name: value for name, value in own.to_own_names(done.folded).items()}
            saved = cast(config.save_dtype, named)
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
                folded = not _same(_llama_layer(saved, prefix, own), done.working)
                writer.add(saved, record=asdict(layers[-1]), scaffold=done.working if folded else None)
            progress.layer_done(layers[-1])
            del tensors, done, named, saved  # or they would wait for the next layer's
    compressor.close()
    return layers


def kept_embedding(writer: CheckpointWriter | None, plan: Plan) -> Tensors | None:
    """The embedding at its planned ranks; None where it stays whole, or another worker writes."""
    return writer.kept_tensors(EMBEDDING) if writer is not None and plan.embedding else None


def _compressed_embedding(writer: CheckpointWriter | None, plan: Plan, width: int) -> torch.Tensor | None:
    """What the compressed stream begins with; None where that is the dense model's embedding."""
    kept = kept_embedding(writer, plan)
    return None if kept is None else expanded(kept, width)


def _reread(writer: CheckpointWriter | None, layer: int) -> tuple[Tensors, Tensors]:
    return ({}, {}) if writer is None else writer.reread(layer)


def _llama_layer(tensors: Tensors, prefix: str, own: Architecture) -> Tensors:
    """A layer of a checkpoint under Llama's names, without the layer's prefix."""
    return own.to_llama_names({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})


def _same(stored: Tensors, working: Tensors) -> bool:
    """Whether the streams ran through exactly what is stored."""
    return stored.keys() == working.keys() and all(
        stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor.cpu())
        for name, tensor in working.items()
    )
