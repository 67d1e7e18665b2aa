"""One layer through its stages: statistics of its activations, factors, folded tensors, activations for the next layer.

Two streams of hidden states walk through the model: the *compressed* one, which every layer that is compressed will
really see, and, only where the correction's target comes from it, the *dense* one of the untouched model.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from oneshot.arch.base import DOWN_PROJ, GATE_PROJ, O_PROJ, UP_PROJ
from oneshot.config import CompressionConfig
from oneshot.factorise import (
    correct,
    predicted_error,
    reduce_queries_keys,
    reduce_values,
    select_heads,
    select_neurons,
)
from oneshot.fold import (
    InnerMaps,
    augmented_weight,
    confine,
    fold_ffn,
    fold_heads,
    fold_hidden,
    fold_inner,
    head_columns,
    keep_heads,
    to_rms_norms,
)
from oneshot.hidden import StreamSubspaces, weighted_rows
from oneshot.recipes import WEIGHT_SELECTORS, Recipe
from oneshot.records import BlockReport, BlockStatistics, CalibrationSet, Factors, ModelShape, Plan
from oneshot.source import SourceModel
from oneshot.statistics import (
    GramAccumulator,
    HeadGramAccumulator,
    MomentAccumulator,
    SketchAccumulator,
    with_constant_column,
)
from oneshot.stream import ActivationStore, LayerStream, StreamLayer, embed_text, release_heap

Tensors = dict[str, torch.Tensor]

NONZEROS = {"count": 1, "sparse-sign": 8}  # per column of the sketching matrix


def reads_activations(recipe: Recipe, plan: Plan, shape: ModelShape) -> bool:
    """Whether the layers need the text: what remains is choices by weights alone, and folding."""
    inner = plan.query_key_size is not None or plan.value_size is not None
    sliced = plan.hidden is not None and recipe.correction == "two-stream"
    by_weights = recipe.ffn in WEIGHT_SELECTORS and recipe.heads == "none" and recipe.correction == "none"
    return inner or sliced or (plan.apply(shape) != shape and not by_weights)


class LayerCompressor:
    """Compresses layers in order: `embed` once where the recipe reads activations, then `compress_layer` for each.

    Everything is computed in the model's own coordinates, on layers of the stock class: a smaller hidden size as a
    stream that is kept inside its subspaces, smaller heads as full heads that compute what the smaller ones can. Only
    the tensors that leave are folded into the smaller coordinates.
    """

    def __init__(
        self,
        config: CompressionConfig,
        recipe: Recipe,
        source: SourceModel,
        plan: Plan,
        subspaces: StreamSubspaces | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        scratch: Path,
    ) -> None:
        shape = source.shape
        self._config, self._recipe = config, recipe
        self._source, self._architecture, self._shape, self._plan = source, source.architecture, shape, plan
        self._subspaces = subspaces
        self._device, self._dtype, self._scratch = device, dtype, scratch
        self._two_streams = recipe.correction == "two-stream"
        self._reduce_heads = plan.kept_num_attention_heads < shape.num_attention_heads
        self._reduce_ffn = plan.kept_intermediate_size < shape.intermediate_size
        # a stream inside subspaces is worth correcting even where every neuron and head stays
        self._correct_slices = subspaces is not None and self._two_streams
        self._solve_attention = self._reduce_heads or plan.value_size is not None or self._correct_slices
        self._solve_ffn = self._reduce_ffn or self._correct_slices
        self._generator = torch.Generator().manual_seed(config.seed)
        self._streams: dict[ModelShape, LayerStream] = {}
        self._hidden: ActivationStore | None = None
        self._dense_hidden: ActivationStore | None = None

    @property
    def tier(self) -> str:
        """The form of the result."""
        return self._plan.tier

    def embed(self, calibration: CalibrationSet) -> None:
        """Fill the activation stores with the embeddings of the calibration text."""
        self._sequence_length = calibration.token_ids.shape[1]
        self._batches, stores = embed_text(
            self._stream(self._shape),
            self._source.checkpoint.read_one(self._architecture.embedding),
            calibration.token_ids,
            self._source.read_positions(),
            num_stores=2 if self._two_streams else 1,
            batch_size=self._config.batch_size,
            max_memory_bytes=self._config.max_memory_bytes,
            folder=self._scratch,
        )
        self._hidden = stores[0]
        self._dense_hidden = stores[1] if self._two_streams else None
        if self._subspaces is not None:
            for batch in self._batches:
                self._hidden.write(batch, self._subspaces.inside(self._hidden.read(batch), 0))

    def close(self) -> None:
        """Release the activations."""
        for store in (self._hidden, self._dense_hidden):
            if store is not None:
                store.close()

    def compress_layer(
        self, layer: int, tensors: Tensors, advance: Callable[[float], None]
    ) -> tuple[Tensors, list[BlockReport]]:
        """The layer's smaller tensors and what was lost. `advance` hears of tokens done, as parts of the layer."""
        self._layer = layer
        working, maps = self._confined(tensors), InnerMaps()
        if self._hidden is None:
            working, reports = self._compress_without_text(working)
            advance(1)
            return self._fold(tensors, working, maps), self._hidden_reports(None) + reports
        passes = 2 + self._solve_attention

        def part(tokens: float) -> None:
            advance(tokens / passes)

        dense = self._stream(self._shape).layer(tensors)
        current = dense if working is tensors else self._stream(self._shape).layer(working)
        reports = self._hidden_reports(dense)
        if self._plan.query_key_size is not None:
            working, maps = self._compress_queries_keys(working, current, self._plan.query_key_size)
            current = self._stream(self._shape).layer(working)
        if self._solve_attention:
            working, maps, report = self._compress_attention(working, maps, dense, current, part)
            reports.append(report)
            current = self._stream_of(working).layer(working)
        statistics, wanted = self._run_attention(working, dense, current, part)
        if self._solve_ffn:
            assert statistics is not None
            del dense, current  # their memory is needed for the factorisation
            release_heap()
            working, factors = self._factorise_ffn(working, statistics)
            del statistics
            current = self._stream_of(working).layer(working)
        measured = self._run_ffn(current, wanted, part)
        if self._solve_ffn:
            sizes = self._shape.intermediate_size, self._plan.kept_intermediate_size
            reports.append(_block_report("ffn", *sizes, factors, measured))
        return self._fold(tensors, working, maps), reports

    def _compress_without_text(self, tensors: Tensors) -> tuple[Tensors, list[BlockReport]]:
        """Recipes that read weights only, and plans that remove nothing."""
        if not self._reduce_ffn:
            return tensors, []
        folded, factors = self._factorise_ffn(tensors, None)
        return folded, [
            _block_report("ffn", self._shape.intermediate_size, self._plan.kept_intermediate_size, factors, None)
        ]

    # Subspaces of the residual stream. Positions: 2 l reads attention, 2 l + 1 the FFN, 2 l + 2 the next layer.

    def _confined(self, tensors: Tensors) -> Tensors:
        """The layer with outputs inside the subspaces that read them."""
        if self._subspaces is None:
            return tensors
        on_device = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        confined = confine(on_device, O_PROJ, self._subspaces.basis(2 * self._layer + 1))
        return confine(confined, DOWN_PROJ, self._subspaces.basis(2 * self._layer + 2))

    def _enter(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """The stream behind a block, on its way to a position."""
        return x if self._subspaces is None else self._subspaces.enter(x, position)

    def _reachable(self, statistics: BlockStatistics, position: int) -> BlockStatistics:
        """The residual within the subspace that the block writes to; its energy counts what lies outside, too."""
        if self._subspaces is None or statistics.residual is None:
            return statistics
        return replace(statistics, residual=self._subspaces.inside(statistics.residual, position))

    def _fold(self, tensors: Tensors, working: Tensors, maps: InnerMaps) -> Tensors:
        """What the checkpoint stores: smaller coordinates, the dtypes of the input."""
        folded = fold_inner(working, maps)
        if self._shape.norm_bias and self._plan.tier == "per-layer":
            folded = to_rms_norms(folded)
        if self._subspaces is not None:
            first = 2 * self._layer
            folded = fold_hidden(folded, *(self._subspaces.basis(first + step) for step in range(3)))
        like = tensors[f"{O_PROJ}.weight"]
        return {
            name: tensor.to("cpu", tensors.get(name, like).dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in folded.items()
        }

    def _hidden_reports(self, dense: StreamLayer | None) -> list[BlockReport]:
        """What the subspaces leave out of the dense stream where norms read it; measured on its last batch."""
        if self._subspaces is None:
            return []
        seen: list[torch.Tensor | None] = [None, None]
        if dense is not None and self._dense_hidden is not None:
            entering = self._dense_hidden.read(self._batches[-1])
            seen = [entering, dense.attention(entering)]
        reports = []
        for half, x in enumerate(seen):
            position = 2 * self._layer + half
            size, predicted = self._subspaces.size(position), self._subspaces.relative_error(position)
            measured = None
            if x is not None:
                rows = weighted_rows(x, centred=self._shape.norm_bias, weighting=self._config.token_weighting)
                measured = _relative_error(rows, self._subspaces.inside(rows, position))
            kind = ("attention input", "ffn input")[half]
            reports.append(BlockReport(kind, self._shape.hidden_size, size, predicted, measured, None, None))
        return reports

    # Inside the heads: queries and keys first, because everything behind them sees the scores.

    def _compress_queries_keys(self, tensors: Tensors, current: StreamLayer, size: int) -> tuple[Tensors, InnerMaps]:
        """A layer whose full queries and keys give the scores of the smaller ones, and the maps to those."""
        shape = self._shape
        queries = HeadGramAccumulator(shape.num_attention_heads, shape.head_dim, device=self._device)
        keys = HeadGramAccumulator(shape.num_key_value_heads, shape.head_dim, device=self._device)
        for _, x, _ in self._read_streams():
            query, key = current.queries_keys(x)
            queries.update_(query)
            keys.update_(key)
        rotary = self._architecture.positions is None
        query_maps, key_maps, pairs = reduce_queries_keys(queries.finish(), keys.finish(), size=size, rotary=rotary)
        # Full queries M⁺ M q and keys Mᵀ N k have the scores (N k)ᵀ (M q); M and (M⁺)ᵀ take them to the smaller ones.
        inverses = torch.linalg.pinv(query_maps)
        group_of_head = slice(None, None, shape.heads_per_group)
        full = InnerMaps(queries=inverses @ query_maps, keys=query_maps[group_of_head].mT @ key_maps)
        return fold_inner(tensors, full), InnerMaps(query_maps, inverses[group_of_head].mT, rotary_pairs=pairs)

    # Attention: statistics of o_proj's input, then heads, values and the correction. The streams do not move.

    def _compress_attention(
        self,
        tensors: Tensors,
        maps: InnerMaps,
        dense: StreamLayer,
        current: StreamLayer,
        advance: Callable[[float], None],
    ) -> tuple[Tensors, InnerMaps, BlockReport]:
        shape, plan = self._shape, self._plan
        weight = augmented_weight(tensors, O_PROJ).to(self._device)
        accumulator = self._accumulator(weight)
        for batch, x, x_dense in self._read_streams():
            heads = current.heads(x)
            target = None
            if x_dense is not None:
                attended = dense.attention(x_dense)
                self._store_dense(batch, attended)
                target = (attended - x).flatten(0, -2) - current.project_heads(heads)
            accumulator.update_(with_constant_column(heads) if shape.output_bias else heads, target)
            advance(x.shape[0] * x.shape[1])
        statistics = self._reachable(accumulator.finish(), 2 * self._layer + 1)
        width = shape.num_attention_heads * shape.head_dim
        heads = torch.arange(shape.num_attention_heads, device=self._device)
        if self._reduce_heads:
            heads = select_heads(
                statistics.gram[:width, :width],
                weight[:, :width],
                num_groups=shape.num_key_value_heads,
                heads_per_group=shape.heads_per_group,
                head_dim=shape.head_dim,
                kept_groups=plan.kept_num_key_value_heads,
                kept_heads_per_group=plan.kept_num_attention_heads // plan.kept_num_key_value_heads,
            )
        columns = head_columns(heads, shape.head_dim)
        factors = self._correct(weight, columns, statistics, has_bias=shape.output_bias)
        maps = keep_heads(maps, heads, shape.heads_per_group)
        if plan.value_size is not None:
            values, restricted = reduce_values(
                factors.weight[:, : len(columns)],
                statistics.gram[columns.unsqueeze(1), columns],
                num_groups=plan.kept_num_key_value_heads,
                head_dim=shape.head_dim,
                size=plan.value_size,
                correct=self._recipe.correction != "none",
                damping=self._config.damping,
            )
            new_weight = torch.cat((restricted, factors.weight[:, len(columns) :]), dim=1)
            error = predicted_error(weight.double(), new_weight, factors.kept, statistics)
            factors = replace(factors, weight=new_weight, predicted_error=error)
            maps = replace(maps, values=values)
        folded = fold_heads(
            tensors, factors, heads=heads, heads_per_group=shape.heads_per_group, head_dim=shape.head_dim
        )
        measured = self._measure_attention(dense, self._stream_of(folded).layer(folded))
        report = _block_report("heads", shape.num_attention_heads, plan.kept_num_attention_heads, factors, measured)
        return folded, maps, report

    def _measure_attention(self, dense: StreamLayer, compressed: StreamLayer) -> float:
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
        width = self._shape.intermediate_size
        accumulator = self._accumulator(augmented_weight(tensors, DOWN_PROJ)) if self._solve_ffn else None
        sketch = self._sketch() if self._reduce_ffn and self._recipe.sketch != "none" else None
        moments = MomentAccumulator(width, device=self._device) if self._recipe.ffn == "tcsp-score" else None
        for batch, x, x_dense in self._read_streams():
            h = self._enter(current.attention(x), 2 * self._layer + 1)
            self._hidden.write(batch, h)
            target = None
            if x_dense is not None:
                # where attention was solved for, the dense stream has gone through it already
                target = dense.ffn(x_dense if self._solve_attention else dense.attention(x_dense))
                self._store_dense(batch, target)
            if accumulator is not None:
                neurons = current.neurons(h)
                if target is not None:
                    target = (target - h).flatten(0, -2) - current.project_neurons(neurons)
                accumulator.update_(with_constant_column(neurons) if self._shape.mlp_bias else neurons, target)
                if sketch is not None:
                    sketch.update_(neurons)
                if moments is not None:
                    moments.update_(neurons)
            advance(x.shape[0] * x.shape[1])
        wanted = current.ffn(h) if self._dense_hidden is None else self._dense_hidden.read(batch)
        if accumulator is None:
            return None, wanted
        statistics = replace(
            self._reachable(accumulator.finish(), 2 * self._layer + 2),
            sketch=None if sketch is None else sketch.finish(),
            moments=None if moments is None else moments.finish(),
        )
        return statistics, wanted

    def _factorise_ffn(self, tensors: Tensors, statistics: BlockStatistics | None) -> tuple[Tensors, Factors]:
        num_neurons = self._shape.intermediate_size
        weight = augmented_weight(tensors, DOWN_PROJ).to(self._device)
        gate = tensors.get(f"{GATE_PROJ}.weight")
        neurons = torch.arange(num_neurons, device=self._device)
        if self._reduce_ffn:
            neurons = select_neurons(
                self._recipe.ffn,
                self._plan.kept_intermediate_size,
                gate=None if gate is None else gate.to(self._device),
                up=tensors[f"{UP_PROJ}.weight"].to(self._device),
                down=weight[:, :num_neurons],
                gram=None if statistics is None else statistics.gram[:num_neurons, :num_neurons],
                generator=self._generator,
                sketch=None if statistics is None else statistics.sketch,
                moments=None if statistics is None else statistics.moments,
                pivoting=self._recipe.pivoting,
                group_size=self._config.pivot_group_size,
            )
        factors = self._correct(weight, neurons, statistics, has_bias=self._shape.mlp_bias)
        return fold_ffn(tensors, factors), factors

    def _run_ffn(self, current: StreamLayer, wanted: torch.Tensor, advance: Callable[[float], None]) -> float:
        """Move the compressed stream through the FFN; the relative error of its output on the last batch."""
        assert self._hidden is not None
        for batch in self._batches:
            h = self._hidden.read(batch)
            moved = current.ffn(h)
            self._hidden.write(batch, self._enter(moved, 2 * self._layer + 2))
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
                self._architecture.resize_config(self._source.checkpoint.config, shape),
                self._architecture,
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
