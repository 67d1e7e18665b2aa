"""One layer through its stages: statistics of its activations, factors, folded tensors, activations for the next layer.

Two streams of hidden states walk through the model: the *compressed* one, which every layer that is compressed will
really see, and, only where the correction's target comes from it, the *dense* one of the untouched model.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oneshot.arch import Architecture
from oneshot.arch.base import DOWN_PROJ, GATE_PROJ, O_PROJ, UP_PROJ
from oneshot.config import CompressionConfig
from oneshot.factorise import correct, select_heads, select_neurons
from oneshot.fold import augmented_weight, fold_ffn, fold_heads, head_columns
from oneshot.recipes import Recipe
from oneshot.records import BlockReport, BlockStatistics, CalibrationSet, Factors, ModelShape, Plan
from oneshot.statistics import GramAccumulator, SketchAccumulator, with_constant_column
from oneshot.stream import ActivationStore, LayerStream, StreamLayer, embed_text, release_heap

Tensors = dict[str, torch.Tensor]

NONZEROS = {"count": 1, "sparse-sign": 8}  # per column of the sketching matrix


class LayerCompressor:
    """Compresses layers in order: `embed` once where the recipe reads activations, then `compress_layer` for each."""

    def __init__(
        self,
        config: CompressionConfig,
        recipe: Recipe,
        model_config: dict[str, Any],
        architecture: Architecture,
        shape: ModelShape,
        plan: Plan,
        *,
        device: torch.device,
        dtype: torch.dtype,
        scratch: Path,
    ) -> None:
        self._config, self._recipe = config, recipe
        self._model_config, self._architecture = model_config, architecture
        self._shape, self._plan = shape, plan
        self._device, self._dtype, self._scratch = device, dtype, scratch
        self._two_streams = recipe.correction == "two-stream"
        self._reduce_heads = plan.kept_num_attention_heads < shape.num_attention_heads
        self._reduce_ffn = plan.kept_intermediate_size < shape.intermediate_size
        self._generator = torch.Generator().manual_seed(config.seed)
        self._streams: dict[ModelShape, LayerStream] = {}
        self._hidden: ActivationStore | None = None
        self._dense_hidden: ActivationStore | None = None

    def embed(self, calibration: CalibrationSet, embedding: torch.Tensor) -> None:
        """Fill the activation stores with the embeddings of the calibration text."""
        self._sequence_length = calibration.token_ids.shape[1]
        self._batches, stores = embed_text(
            self._stream(self._shape),
            embedding,
            calibration.token_ids,
            num_stores=2 if self._two_streams else 1,
            batch_size=self._config.batch_size,
            max_memory_bytes=self._config.max_memory_bytes,
            folder=self._scratch,
        )
        self._hidden = stores[0]
        self._dense_hidden = stores[1] if self._two_streams else None

    def close(self) -> None:
        """Release the activations."""
        for store in (self._hidden, self._dense_hidden):
            if store is not None:
                store.close()

    def compress_layer(self, tensors: Tensors, advance: Callable[[float], None]) -> tuple[Tensors, list[BlockReport]]:
        """The layer's smaller tensors and what was lost. `advance` hears of tokens done, as parts of the layer."""
        if self._hidden is None:
            folded, reports = self._compress_without_text(tensors)
            advance(1)
            return folded, reports
        folded, reports = tensors, []
        dense = current = self._stream(self._shape).layer(tensors)
        passes = 2 + self._reduce_heads
        if self._reduce_heads:
            folded, report = self._compress_heads(tensors, dense, lambda tokens: advance(tokens / passes))
            reports.append(report)
            current = self._stream_of(folded).layer(folded)
        statistics, wanted = self._run_attention(tensors, dense, current, lambda tokens: advance(tokens / passes))
        if self._reduce_ffn:
            assert statistics is not None
            del dense, current  # their memory is needed for the factorisation
            release_heap()
            folded, factors = self._factorise_ffn(folded, statistics)
            del statistics
            current = self._stream_of(folded).layer(folded)
        measured = self._run_ffn(current, wanted, lambda tokens: advance(tokens / passes))
        if self._reduce_ffn:
            reports.append(
                _block_report(
                    "ffn", self._shape.intermediate_size, self._plan.kept_intermediate_size, factors, measured
                )
            )
        return folded, reports

    def _compress_without_text(self, tensors: Tensors) -> tuple[Tensors, list[BlockReport]]:
        """Recipes that read weights only, and plans that remove nothing."""
        if not self._reduce_ffn:
            return tensors, []
        folded, factors = self._factorise_ffn(tensors, None)
        return folded, [
            _block_report("ffn", self._shape.intermediate_size, self._plan.kept_intermediate_size, factors, None)
        ]

    # Heads: statistics of o_proj's input, then the fold. The streams do not move.

    def _compress_heads(
        self, tensors: Tensors, dense: StreamLayer, advance: Callable[[float], None]
    ) -> tuple[Tensors, BlockReport]:
        shape, plan = self._shape, self._plan
        weight = augmented_weight(tensors, O_PROJ).to(self._device)
        accumulator = self._accumulator(weight)
        for batch, x, x_dense in self._read_streams():
            heads = dense.heads(x)
            target = None
            if x_dense is not None:
                attended = dense.attention(x_dense)
                self._store_dense(batch, attended)
                target = (attended - x).flatten(0, -2) - dense.project_heads(heads)
            accumulator.update_(with_constant_column(heads) if shape.output_bias else heads, target)
            advance(x.shape[0] * x.shape[1])
        statistics = accumulator.finish()
        width = shape.num_attention_heads * shape.head_dim
        heads = select_heads(
            statistics.gram[:width, :width],
            weight[:, :width],
            num_groups=shape.num_key_value_heads,
            heads_per_group=shape.heads_per_group,
            head_dim=shape.head_dim,
            kept_groups=plan.kept_num_key_value_heads,
            kept_heads_per_group=plan.kept_num_attention_heads // plan.kept_num_key_value_heads,
        )
        factors = self._correct(weight, head_columns(heads, shape.head_dim), statistics, has_bias=shape.output_bias)
        folded = fold_heads(
            tensors, factors, heads=heads, heads_per_group=shape.heads_per_group, head_dim=shape.head_dim
        )
        measured = self._measure_heads(dense, self._stream_of(folded).layer(folded))
        return folded, _block_report(
            "heads", shape.num_attention_heads, plan.kept_num_attention_heads, factors, measured
        )

    def _measure_heads(self, dense: StreamLayer, compressed: StreamLayer) -> float:
        """Relative error of the attention block's output on the last batch."""
        assert self._hidden is not None
        x = self._hidden.read(self._batches[-1])
        wanted = dense.attention(x) if self._dense_hidden is None else self._dense_hidden.read(self._batches[-1])
        return _relative_error(wanted - x, compressed.attention(x) - x)

    # FFN: attention moves the streams on and the statistics of down_proj's input come with it; then fold, then FFN.

    def _run_attention(
        self, tensors: Tensors, dense: StreamLayer, current: StreamLayer, advance: Callable[[float], None]
    ) -> tuple[BlockStatistics | None, torch.Tensor]:
        """Move both streams through attention (the dense one through its FFN, too) and gather the FFN's statistics.

        Also returns the hidden states that the last batch ought to have after the FFN, to measure the error against.
        """
        assert self._hidden is not None
        accumulator = self._accumulator(augmented_weight(tensors, DOWN_PROJ)) if self._reduce_ffn else None
        sketch = self._sketch() if self._reduce_ffn and self._recipe.sketch != "none" else None
        for batch, x, x_dense in self._read_streams():
            h = current.attention(x)
            self._hidden.write(batch, h)
            target = None
            if x_dense is not None:
                # with heads reduced the dense stream has gone through attention already
                target = dense.ffn(x_dense if self._reduce_heads else dense.attention(x_dense))
                self._store_dense(batch, target)
            if accumulator is not None:
                neurons = current.neurons(h)
                if target is not None:
                    target = (target - h).flatten(0, -2) - current.project_neurons(neurons)
                accumulator.update_(with_constant_column(neurons) if self._shape.mlp_bias else neurons, target)
                if sketch is not None:
                    sketch.update_(neurons)
            advance(x.shape[0] * x.shape[1])
        wanted = current.ffn(h) if self._dense_hidden is None else self._dense_hidden.read(batch)
        if accumulator is None:
            return None, wanted
        return replace(accumulator.finish(), sketch=None if sketch is None else sketch.finish()), wanted

    def _factorise_ffn(self, tensors: Tensors, statistics: BlockStatistics | None) -> tuple[Tensors, Factors]:
        num_neurons = self._shape.intermediate_size
        weight = augmented_weight(tensors, DOWN_PROJ).to(self._device)
        neurons = select_neurons(
            self._recipe.ffn,
            self._plan.kept_intermediate_size,
            gate=tensors[f"{GATE_PROJ}.weight"].to(self._device),
            up=tensors[f"{UP_PROJ}.weight"].to(self._device),
            down=weight[:, :num_neurons],
            gram=None if statistics is None else statistics.gram[:num_neurons, :num_neurons],
            generator=self._generator,
            sketch=None if statistics is None else statistics.sketch,
            pivoting=self._recipe.pivoting,
            group_size=self._config.group_size,
        )
        factors = self._correct(weight, neurons, statistics, has_bias=self._shape.mlp_bias)
        return fold_ffn(tensors, factors), factors

    def _run_ffn(self, current: StreamLayer, wanted: torch.Tensor, advance: Callable[[float], None]) -> float:
        """Move the compressed stream through the FFN; the relative error of its output on the last batch."""
        assert self._hidden is not None
        for batch in self._batches:
            h = self._hidden.read(batch)
            moved = current.ffn(h)
            self._hidden.write(batch, moved)
            advance(h.shape[0] * h.shape[1])
        return _relative_error(wanted - h, moved - h)

    # Shared by both blocks

    def _correct(
        self, weight: torch.Tensor, columns: torch.Tensor, statistics: BlockStatistics | None, *, has_bias: bool
    ) -> Factors:
        """Correct a consuming linear over the kept columns; `has_bias`: its last column is the bias, which stays."""
        if has_bias:
            columns = torch.cat((columns, columns.new_tensor([weight.shape[1] - 1])))
        return correct(
            weight,
            columns,
            statistics,
            correction=self._recipe.correction,
            damping=self._config.damping,
            residual_weight=self._config.residual_weight,
        )

    def _accumulator(self, weight: torch.Tensor) -> GramAccumulator:
        output_size = weight.shape[0] if self._two_streams else None
        return GramAccumulator(weight.shape[1], output_size=output_size, device=self._device)

    def _sketch(self) -> SketchAccumulator:
        width = self._shape.intermediate_size
        return SketchAccumulator(
            self._config.sketch_size or 2 * width,
            width,
            nonzeros=NONZEROS[self._recipe.sketch],
            seed=self._config.seed,
            device=self._device,
        )

    def _read_streams(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        assert self._hidden is not None
        for batch in self._batches:
            yield (
                batch,
                self._hidden.read(batch),
                None if self._dense_hidden is None else self._dense_hidden.read(batch),
            )

    def _store_dense(self, batch: slice, values: torch.Tensor) -> None:
        assert self._dense_hidden is not None
        self._dense_hidden.write(batch, values)

    def _stream(self, shape: ModelShape) -> LayerStream:
        """The layer builder for a shape, made once."""
        if shape not in self._streams:
            self._streams[shape] = LayerStream(
                self._architecture.resize_config(self._model_config, shape),
                sequence_length=self._sequence_length,
                device=self._device,
                dtype=self._dtype,
            )
        return self._streams[shape]

    def _stream_of(self, tensors: Tensors) -> LayerStream:
        """The layer builder for the shape that folded tensors have."""
        num_heads = tensors[f"{O_PROJ}.weight"].shape[1] // self._shape.head_dim
        reduced_heads = num_heads < self._shape.num_attention_heads
        width = tensors[f"{DOWN_PROJ}.weight"].shape[1]
        groups = self._plan.kept_num_key_value_heads if reduced_heads else self._shape.num_key_value_heads
        return self._stream(Plan(width, num_heads, groups, self._plan.head_unit).apply(self._shape))


def _relative_error(wanted: torch.Tensor, reached: torch.Tensor) -> float:
    energy = wanted.double().norm().clamp_min(torch.finfo(torch.float64).tiny)  # a block may give nothing at all
    return float((wanted - reached).double().norm() / energy)


def _block_report(kind: str, dense_size: int, kept_size: int, factors: Factors, measured: float | None) -> BlockReport:
    return BlockReport(
        kind=kind,
        dense_size=dense_size,
        kept_size=kept_size,
        predicted_error=factors.predicted_error,
        measured_error=measured,
        condition_number=factors.condition_number,
        max_interpolation=factors.max_interpolation,
        eigenvalue_fallback=factors.eigenvalue_fallback,
    )
