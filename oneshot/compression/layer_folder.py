"""From a compressed layer in the model's own coordinates to the smaller tensors that the checkpoint stores."""

from collections.abc import Sequence

import torch

from oneshot.architecture import Attention, Stack, Sublayer
from oneshot.checkpoint import Model
from oneshot.compression.fold import cut_heads, fold_hidden, to_rms_norms, without_sublayer
from oneshot.compression.fold_post_norm import fold_post_norm
from oneshot.compression.inner_heads import fold_inner
from oneshot.compression.ranks import fold_ranks
from oneshot.compression.sublayer import LayerWork
from oneshot.compression.subspaces import StreamSubspaces
from oneshot.machine.transfer import to_host
from oneshot.planning import Grid
from oneshot.tensors import Tensors


def fold_layer(
    model: Model,
    grid: Grid,
    subspaces: StreamSubspaces | None,
    layer: int,
    work: LayerWork,
    left_out: Sequence[Sublayer],
) -> Tensors:
    """Return the layer as the form stores it, on its device; tensors that stay as they are are the same.

    `left_out`: sublayers that the checkpoint does not store.
    """
    stack, folded = model.family.stack_of(layer), work.working
    # 1. Smaller heads and linears of low rank.
    for index, sublayer in enumerate(stack.sublayers):
        if index in work.maps and isinstance(sublayer.mixer, Attention):
            heads = work.maps[index].heads
            if heads is not None:
                folded = cut_heads(folded, sublayer.mixer, model.shape.of(layer), heads)
            folded = fold_inner(folded, sublayer.mixer, work.maps[index])
        folded = fold_ranks(folded, sublayer.mixer, work.ranks.get(index, {}))
    # 2. LayerNorms as RMSNorms, if the form has only these.
    if grid.folds_layer_norms:
        folded = to_rms_norms(folded, stack)
    # 3. The subspaces of the stream, if the hidden size shrinks.
    if subspaces is not None:
        bases = [subspaces.basis(stack.position(layer, index)) for index in range(len(stack.sublayers) + 1)]
        if stack.norms_after:
            folded = fold_post_norm(folded, stack, model.read_norm_before(layer), bases)
        else:
            folded = fold_hidden(folded, stack, bases, _memory_reading(model, subspaces, stack))
    # 4. Sublayers that are left out.
    for sublayer in left_out:
        folded = without_sublayer(folded, sublayer)
    return folded


def _memory_reading(model: Model, subspaces: StreamSubspaces, stack: Stack) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the weight of the encoder's final norm and the basis that it reads, for a decoder."""
    if stack.first_layer == 0:
        return None
    encoder = model.family.stack
    gamma = model.read_final_norm(encoder)["weight"]
    return gamma, subspaces.basis(encoder.position(stack.first_layer))


def on_host(
    tensors: Tensors, uploaded: Tensors, folded: Tensors, working: Tensors, dtype: torch.dtype
) -> tuple[Tensors, Tensors]:
    """Return the folded layer in the dtypes that the checkpoint stores, and the `working` one, on the host.

    Tensors that did not change since `tensors` were `uploaded` are the input's. `dtype`: of weights that the input does
    not have.
    """
    folded = {
        name: tensor.to(tensors[name].dtype if name in tensors else dtype) if tensor.is_floating_point() else tensor
        for name, tensor in folded.items()
    }
    host = {id(tensor): tensors[name] for name, tensor in uploaded.items()}
    changed = {id(tensor): tensor for tensor in (*folded.values(), *working.values()) if id(tensor) not in host}
    copies = to_host({str(key): tensor for key, tensor in changed.items()})
    host |= {key: copies[str(key)] for key in changed}
    return (
        {name: host[id(tensor)] for name, tensor in folded.items()},
        {name: host[id(tensor)] for name, tensor in working.items()},
    )
