"""What a run writes, apart from the layers: where, in which dtype, what is outside them, and what lies beside."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oneshot.arch import LLAMA
from oneshot.checkpoint import Checkpoint
from oneshot.config import CompressionConfig
from oneshot.errors import OutputError, cause
from oneshot.export.hf import stock_config, verify, write_companions
from oneshot.export.per_layer import per_layer_config, write_modelling_file
from oneshot.fold import fold_embedding, fold_head
from oneshot.hidden import StreamSubspaces
from oneshot.records import Plan, Report
from oneshot.report import REPORT_NAME
from oneshot.source import SourceModel
from oneshot.writer import CheckpointWriter, refuse_output

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]

POSITIONS = "model.embed_positions.weight"  # in the per-layer form
SAVED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def output_folder(config: CompressionConfig) -> Path:
    """Where the result shall appear. Raises `OutputError` for what can be no folder's name."""
    try:
        folder = Path(config.output).expanduser()
        folder.resolve().exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a zero byte
        raise OutputError(f"--output {config.output} cannot be used ({cause(error)}); choose another.") from error
    return folder


def refuse_place(config: CompressionConfig, checkpoint: Checkpoint) -> None:
    """Raise `OutputError` where the result cannot appear at its place."""
    output = output_folder(config)
    if checkpoint.folder.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"{output} holds the input checkpoint; choose another --output.")
    refuse_output(output, overwrite=config.overwrite, resume=config.resume)


def finished_report(output: Path, fingerprint: dict[str, Any]) -> Report | None:
    """The report of a finished run with this fingerprint; None where the output is another run's."""
    path = output / REPORT_NAME
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    return Report.from_dict(values) if values.get("fingerprint") == fingerprint else None


def output_config(source: SourceModel, plan: Plan) -> dict[str, Any]:
    """The config.json of the result; raises `PlanError` where the family's stock config cannot hold it."""
    config, shape, stack = source.checkpoint.config, source.shape, plan.stack(source.shape)
    if plan.tier == "per-layer":
        return per_layer_config(config, shape, stack)
    kept = plan.kept_layers
    resized = replace(plan.shape_of_layer(shape, kept[0]), hidden_size=stack.embedding_size)
    if len(kept) < shape.num_hidden_layers:
        config = _with_layers(config, kept)
    return stock_config(source.architecture.resize_config(config, resized), untied=plan.hidden is not None)


def _with_layers(config: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """The config of a model of these layers of the one that it describes."""
    fewer = config | {"num_hidden_layers": len(kept)}
    types = config.get("layer_types")
    return fewer if types is None else fewer | {"layer_types": [types[layer] for layer in kept]}


def expected_bytes(save_dtype: str, checkpoint: Checkpoint, parameters: int) -> int:
    """Bytes that weight files of so many parameters will take, to the size of their headers."""
    if save_dtype != "keep":
        return parameters * SAVED_DTYPES[save_dtype].itemsize
    return round(checkpoint.num_bytes * parameters / checkpoint.num_parameters)


def outside_shards(
    source: SourceModel, plan: Plan, embedding: Tensors | None = None
) -> list[Callable[[StreamSubspaces | None], Tensors]]:
    """Readers of what is outside the layers, a shard each: as it is, or folded into subspaces or the per-layer form.

    `embedding`: what stands for it where the plan has ranks for it.
    """
    checkpoint, architecture, shape = source.checkpoint, source.architecture, source.shape

    def embeddings(subspaces: StreamSubspaces | None) -> Tensors:
        if embedding is not None:
            return embedding
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


def cast(save_dtype: str, tensors: Tensors) -> Tensors:
    """The tensors in the dtype that is saved; what lies beyond its range becomes its largest value, with a warning."""
    if save_dtype == "keep":
        return tensors
    dtype = SAVED_DTYPES[save_dtype]
    largest = torch.finfo(dtype).max
    in_dtype = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            in_dtype[name] = tensor
            continue
        beyond = int(((tensor.abs() > largest) & tensor.isfinite()).sum())
        if beyond:
            logger.warning("%s has %d values beyond the range of %s; they are clamped.", name, beyond, save_dtype)
            tensor = torch.where(tensor.isfinite(), tensor.clamp(-largest, largest), tensor)
        in_dtype[name] = tensor.to(dtype)
    return in_dtype


def finish_folder(config: CompressionConfig, source: SourceModel, plan: Plan, writer: CheckpointWriter) -> int:
    """Everything beside the weights; the stored parameters of the checkpoint, which a model class would load now."""
    writer.finish_weights()
    save_dtype = None if config.save_dtype == "keep" else config.save_dtype
    write_companions(source.checkpoint.folder, writer.partial, output_config(source, plan), dtype=save_dtype)
    if plan.tier == "per-layer":
        write_modelling_file(writer.partial)
    return verify(writer.partial).num_parameters
