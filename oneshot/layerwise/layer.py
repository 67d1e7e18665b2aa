"""One layer through its stages: statistics of its activations, factors, folded tensors; then the streams move on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from oneshot.arch.base import DOWN_PROJ, O_PROJ
from oneshot.config import CompressionConfig
from oneshot.fold import InnerMaps, confine, fold_hidden, fold_inner, to_rms_norms
from oneshot.hidden import StreamSubspaces, weighted_rows
from oneshot.layerwise.attention import AttentionBlock
from oneshot.layerwise.block import block_report, relative_error
from oneshot.layerwise.ffn import FfnBlock
from oneshot.layerwise.streams import Streams, Tensors
from oneshot.recipes import WEIGHT_SELECTORS, Recipe
from oneshot.records import BlockReport, CalibrationSet, ModelShape, Plan
from oneshot.source import SourceModel
from oneshot.stream import StreamLayer, release_heap
from oneshot.workers import ALONE, Workers


def reads_activations(recipe: Recipe, plan: Plan, shape: ModelShape) -> bool:
    """Whether the layers need the text: what remains is choices by weights alone, and folding."""
    inner = plan.query_key_size is not None or plan.value_size is not None
    sliced = plan.hidden is not None and recipe.correction == "two-stream"
    by_weights = recipe.ffn in WEIGHT_SELECTORS and recipe.heads == "none" and recipe.correction == "none"
    return inner or sliced or (plan.shrinks_layers(shape) and not by_weights)


@dataclass(frozen=True)
class CompressedLayer:
    """A layer that is done.

    `folded` is what the checkpoint stores, `working` what the compressed stream went through: the same tensors unless
    something was folded (smaller coordinates, smaller heads).
    """

    folded: Tensors
    working: Tensors
    reports: list[BlockReport]


class LayerCompressor:
    """Compresses layers in order: `embed` once where the recipe reads activations, then `compress_layer` for each.

    Everything is computed in the model's own coordinates, on layers of the stock class: a smaller hidden size as a
    stream that is kept inside its subspaces, smaller heads as full heads that compute what the smaller ones can. Only
    the tensors that leave are folded into the smaller coordinates. Positions of the residual stream: 2 l is where
    attention of layer l reads it, 2 l + 1 where its FFN does, 2 l + 2 where the next layer does.
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
        tier: str,
        workers: Workers = ALONE,
    ) -> None:
        self._config, self._shape, self._plan, self._subspaces = config, source.shape, plan, subspaces
        self._recipe, self._device = recipe, device
        self.streams = Streams(
            config,
            source,
            subspaces,
            two=recipe.correction == "two-stream",
            device=device,
            dtype=dtype,
            scratch=scratch,
            tier=tier,
            workers=workers,
        )

    def _blocks(self, layer: int) -> tuple[AttentionBlock, FfnBlock]:
        """The blocks of a layer; each draws the same, whichever layer a run begins with and whichever worker draws."""
        kept, seed = self._plan.layers[layer], self._config.seed + layer
        shared = (
            self._config,
            self._recipe,
            self._shape,
            self._plan,
            kept,
            self._subspaces,
            self.streams,
            self._device,
        )
        return (
            AttentionBlock(*shared, torch.Generator().manual_seed(seed)),
            FfnBlock(*shared, torch.Generator().manual_seed(seed)),
        )

    def embed(self, calibration: CalibrationSet, compressed: torch.Tensor | None = None) -> None:
        """Fill the activation stores with the embeddings of the calibration text (see `Streams.embed`)."""
        self.streams.embed(calibration, compressed)

    def close(self) -> None:
        """Release the activations."""
        self.streams.close()

    def replay_layer(self, layer: int, tensors: Tensors, working: Tensors, advance: Callable[[float], None]) -> None:
        """Move the streams through a layer that another run finished: its dense tensors, and its `working` ones."""
        if not self.streams.has_text:
            return
        if not working:
            self._pass_by(tensors, advance)
            return
        _, ffn = self._blocks(layer)
        dense, current = self.streams.layer(tensors), self.streams.layer(working)
        for batch, x, x_dense in self.streams.read():
            h = ffn.enter(current.attention(x), 2 * layer + 1)
            self.streams.write(batch, ffn.enter(current.ffn(h), 2 * layer + 2))
            if x_dense is not None:
                self.streams.write_dense(batch, dense.ffn(dense.attention(x_dense)))
            advance(x.shape[0] * x.shape[1])

    def compress_layer(self, layer: int, tensors: Tensors, advance: Callable[[float], None]) -> CompressedLayer:
        """The layer's smaller tensors and what was lost. `advance` hears of tokens done, as parts of the layer."""
        release_heap()  # of the last layer's factorisation
        if self._plan.layers[layer].is_left_out:
            self._pass_by(tensors, advance)
            dense_sizes = {"heads": self._shape.num_attention_heads, "ffn": self._shape.intermediate_size}
            gone = [BlockReport(kind, size, 0, None, None, None, None) for kind, size in dense_sizes.items()]
            return CompressedLayer({}, {}, gone)
        attention, ffn = self._blocks(layer)
        sizes = self._shape.intermediate_size, ffn.kept.intermediate_size
        working, maps = self._confined(layer, tensors), InnerMaps()
        if not self.streams.has_text:
            reports = self._input_reports(layer, None)
            if ffn.reduces_neurons:
                working, factors = ffn.factorise(layer, working, None)
                reports.append(block_report("ffn", *sizes, factors, None))
            advance(1)
            return CompressedLayer(self._fold(layer, tensors, working, maps), working, reports)
        passes = ffn.passes + attention.is_solved_for

        def part(tokens: float) -> None:
            advance(tokens / passes)

        dense = self.streams.layer(tensors)
        current = dense if working is tensors else self.streams.layer(working)
        reports = self._input_reports(layer, dense)
        if self._plan.query_key_size is not None:
            working, maps = attention.reduce_queries_keys(layer, working, current, self._plan.query_key_size)
            current = self.streams.layer(working)
        if attention.is_solved_for:
            working, maps, report = attention.compress(layer, working, maps, dense, current, part)
            reports.append(report)
            release_heap()
            current = self.streams.layer(working)
        statistics, wanted = ffn.run_attention(
            layer, working, dense, current, part, dense_attended=attention.is_solved_for and attention.follows_dense
        )
        if ffn.is_solved_for:
            del dense, current  # their memory is needed for the factorisation
            release_heap()
            working, factors = ffn.factorise(layer, working, statistics)
            if ffn.corrects_up and statistics is not None:
                del statistics
                working, factors = ffn.correct_up(layer, tensors, working, part)
            current = self.streams.layer(working)
        measured = ffn.run_ffn(layer, current, wanted, part)
        if ffn.is_solved_for:
            reports.append(block_report("ffn", *sizes, factors, measured))
        return CompressedLayer(self._fold(layer, tensors, working, maps), working, reports)

    def _pass_by(self, tensors: Tensors, advance: Callable[[float], None]) -> None:
        """A layer that is left out: only the dense stream goes through it."""
        if not self.streams.has_text:
            advance(1)
            return
        dense = self.streams.layer(tensors)
        for batch, x, x_dense in self.streams.read():
            if x_dense is not None:
                self.streams.write_dense(batch, dense.ffn(dense.attention(x_dense)))
            advance(x.shape[0] * x.shape[1])

    def _confined(self, layer: int, tensors: Tensors) -> Tensors:
        """The layer with outputs inside the subspaces that read them."""
        if self._subspaces is None:
            return tensors
        on_device = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        confined = confine(on_device, O_PROJ, self._subspaces.basis(2 * layer + 1))
        return confine(confined, DOWN_PROJ, self._subspaces.basis(2 * layer + 2))

    def _fold(self, layer: int, tensors: Tensors, working: Tensors, maps: InnerMaps) -> Tensors:
        """What the checkpoint stores: smaller coordinates, the dtypes of the input."""
        folded = fold_inner(working, maps)
        if self._shape.norm_bias and self._plan.tier == "per-layer":
            folded = to_rms_norms(folded)
        if self._subspaces is not None:
            folded = fold_hidden(folded, *(self._subspaces.basis(2 * layer + step) for step in range(3)))
        like = tensors[f"{O_PROJ}.weight"]
        return {
            name: tensor.to("cpu", tensors.get(name, like).dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in folded.items()
        }

    def _input_reports(self, layer: int, dense: StreamLayer | None) -> list[BlockReport]:
        """What the subspaces leave out of the dense stream where norms read it; measured on its last batch."""
        if self._subspaces is None:
            return []
        seen: list[torch.Tensor | None] = [None, None]
        if dense is not None:
            _, entering = self.streams.read_last()
            seen = [entering, None if entering is None else dense.attention(entering)]
        reports = []
        for half, x in enumerate(seen):
            position = 2 * layer + half
            size, predicted = self._subspaces.size(position), self._subspaces.relative_error(position)
            measured = None
            if x is not None:
                rows = weighted_rows(x, centred=self._shape.norm_bias, weighting=self._config.token_weighting)
                measured = relative_error(rows, self._subspaces.inside(rows, position))
            kind = ("attention input", "ffn input")[half]
            reports.append(BlockReport(kind, self._shape.hidden_size, size, predicted, measured, None, None))
        return reports
