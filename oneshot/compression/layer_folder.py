"""From a compressed layer in the model's own coordinates to the smaller tensors that the checkpoint stores."""

from collections.abc import Mapping, Sequence

import torch

from oneshot.architecture import Attention, Stack, Sublayer
from oneshot.checkpoint import Model
from oneshot.compression.fold import cut_heads, fold_hidden, to_rms_norms, without_sublayer
from oneshot.compression.fold_post_norm import fold_post_norm
from oneshot.compression.inner_heads import InnerMaps, fold_inner
from oneshot.compression.ranks import Ranks, fold_ranks
from oneshot.compression.subspaces import StreamSubspaces
from oneshot.planning import Grid
from oneshot.tensors import Tensors


class LayerFolder:
    """Fold layers: smaller heads, low ranks and a smaller hidden size become smaller tensors, as the form has them."""

    def __init__(self, model: Model, grid: Grid, subspaces: StreamSubspaces | None) -> None:
        self._model, self._grid, self._subspaces = model, grid, subspaces

    def fold(
        self,
        layer: int,
        working: Tensors,
        maps: Mapping[int, InnerMaps],
        ranks: Mapping[int, Ranks],
        left_out: Sequence[Sublayer],
    ) -> Tensors:
        """Return the folded layer, on the device of `working`; tensors that stay as they are are the same.

        Args:
            working: the layer that the compressed stream passed. maps, ranks: by the sublayer's index.
            left_out: sublayers that the checkpoint does not store.
        """
        stack, folded = self._model.family.stack_of(layer), working
        for index, sublayer in enumerate(stack.sublayers):
            if index in maps and isinstance(sublayer.mixer, Attention):
                heads = maps[index].heads
                if heads is not None:
                    folded = cut_heads(folded, sublayer.mixer, self._model.shape.of(layer), heads)
                folded = fold_inner(folded, sublayer.mixer, maps[index])
            folded = fold_ranks(folded, sublayer.mixer, ranks.get(index, {}))
        if self._grid.folds_layer_norms:
            folded = to_rms_norms(folded, stack)
        folded = self._fold_hidden(layer, folded)
        for sublayer in left_out:
            folded = without_sublayer(folded, sublayer)
        return folded

    def _fold_hidden(self, layer: int, folded: Tensors) -> Tensors:
        """Return the layer inside the subspaces of the stream, if the hidden size shrinks."""
        subspaces, stack = self._subspaces, self._model.family.stack_of(layer)
        if subspaces is None:
            return folded
        bases = [subspaces.basis(stack.position(layer, index)) for index in range(len(stack.sublayers) + 1)]
        if stack.norms_after:
            return fold_post_norm(folded, stack, self._model.read_norm_before(layer), bases)
        return fold_hidden(folded, stack, bases, self._memory_reading(subspaces, stack))

    def _memory_reading(self, subspaces: StreamSubspaces, stack: Stack) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the weight of the encoder's final norm and the basis that it reads, for a decoder."""
        if stack.first_layer == 0:
            return None
        encoder = self._model.family.stack
        gamma = self._model.read_final_norm(encoder)["weight"]
        return gamma, subspaces.basis(encoder.position(stack.first_layer))
