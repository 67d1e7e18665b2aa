"""A smaller hidden size: one projection for the whole model, from the principal directions of its residual stream.

One dense pass over the text sums the Gram of what every norm sees; the leading eigenvectors `P (D, d)` then go into
every weight that touches the residual stream (TCSP section 4; METHODS section 5). The result is a stock checkpoint in
a scratch folder, which the other stages compress further or pass on as it is.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from oneshot.checkpoint import CheckpointWriter
from oneshot.config import CompressionConfig
from oneshot.fold import fold_hidden, project_input, times
from oneshot.linalg.pca import Subspace, principal_subspace
from oneshot.records import CalibrationSet
from oneshot.source import SourceModel
from oneshot.statistics import GramAccumulator
from oneshot.stream import LayerStream, embed_text


def hidden_subspace(
    config: CompressionConfig,
    source: SourceModel,
    calibration: CalibrationSet,
    size: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    scratch: Path,
    advance: Callable[[float], None],
) -> Subspace:
    """The `size` directions that hold most of the residual stream, every token and every norm counted alike.

    Rows are divided by their root mean square, as the norms do: a few tokens with massive activations would be the
    principal directions otherwise. `advance` hears of tokens done, layer after layer.
    """
    checkpoint, architecture, shape = source.checkpoint, source.architecture, source.shape
    token_ids = calibration.token_ids
    stream = LayerStream(checkpoint.config, sequence_length=token_ids.shape[1], device=device, dtype=dtype)
    groups, (hidden,) = embed_text(
        stream,
        checkpoint.read_one(architecture.embedding),
        token_ids,
        num_stores=1,
        batch_size=config.batch_size,
        max_memory_bytes=config.max_memory_bytes,
        folder=scratch,
    )
    accumulator = GramAccumulator(shape.hidden_size, output_size=None, device=device)
    for number in range(shape.num_hidden_layers):
        layer = stream.layer(checkpoint.read_prefix(architecture.layer_prefix(number)))
        for batch in groups:
            x = hidden.read(batch)
            h = layer.attention(x)
            accumulator.update_(_unit_rows(x))
            accumulator.update_(_unit_rows(h))
            hidden.write(batch, layer.ffn(h))
            advance(x.shape[0] * x.shape[1])
    for batch in groups:
        accumulator.update_(_unit_rows(hidden.read(batch)))
    hidden.close()
    return principal_subspace(accumulator.finish().gram, size)


def _unit_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(0, -2).float()
    return rows / rows.square().mean(1, keepdim=True).sqrt().clamp_min(torch.finfo(rows.dtype).tiny)


def project_model(source: SourceModel, basis: torch.Tensor, folder: Path, *, max_shard_bytes: int) -> None:
    """Write the model inside the subspace `basis` = `P (D, d)` to `folder`: weights and config, no tokenizer.

    Embedding `E P`, layers by `fold_hidden`. The output head takes the last norm's weight and the projection, so tied
    embeddings are no longer tied.
    """
    checkpoint, architecture = source.checkpoint, source.architecture
    shape = replace(source.shape, hidden_size=basis.shape[1])
    config = architecture.resize_config(checkpoint.config, shape) | {"tie_word_embeddings": False}
    prefixes = [architecture.layer_prefix(layer) for layer in range(shape.num_hidden_layers)]
    with CheckpointWriter(folder, max_shard_bytes=max_shard_bytes, overwrite=False, expected_bytes=0) as writer:
        head_name, norm_name = architecture.output_head, architecture.final_norm
        norm = checkpoint.read_one(norm_name)
        embedding = checkpoint.read_one(architecture.embedding)
        head = checkpoint.read_one(head_name) if head_name in checkpoint.tensor_names else embedding
        writer.add({architecture.embedding: times(embedding, basis)})
        del embedding
        writer.add({norm_name: norm.new_ones(basis.shape[1]), head_name: project_input(head, norm, basis)})
        del head
        for prefix in prefixes:
            folded = fold_hidden(checkpoint.read_prefix(prefix), basis)
            writer.add({prefix + name: tensor for name, tensor in folded.items()})
        writer.finish_weights()
        (writer.partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        writer.commit()
