"""A second sweep: solve the writers of a compressed model again, for the inputs that they have when all is compressed.

The first pass corrects each layer once, in order. `swept_` goes through the assembled model layer by layer once more:
`o_proj` and `down_proj` change by ridge regression towards the dense stream. A writer of low rank keeps its rank,
because only what it makes of its coordinates changes. `gpu.py` runs it; it is not in the package, because it does not
pay (docs/experiments.md).
"""

from typing import Any

import torch
from mixture_parts import layer_inputs, ridge

DAMPING = 0.03  # ridge in units of the Gram's mean diagonal, as in the first pass
TOGETHER = 4  # sequences of a batch


@torch.inference_mode()
def swept_(result: Any, dense: Any, windows: torch.Tensor, share: float) -> list[float]:
    """Solve the writers of every layer again, in place; return how far the stream is from the dense one behind each.

    The measure is the squared distance relative to the dense stream, before the layer's change.

    Args:
        result: a Llama of the per-layer form. dense: the stock Llama. windows: int64 `(sequences, length)` on the
            models' device. share: of the residual that is asked for.
    """
    ranks = [sizes["output_rank"] for sizes in result.config.layers]
    result.expand_(0.0)
    streams = [model.model.embed_tokens(windows) for model in (result, dense)]
    others = [layer_inputs(model, windows[:TOGETHER])[1] for model in (result, dense)]
    distances = []
    for number, (layer, reference) in enumerate(zip(result.model.layers, dense.model.layers, strict=True)):
        named, dense_named = (of_model[number] for of_model in others)
        wanted = [_pass(reference, x, dense_named) for x in streams[1].split(TOGETHER)]
        streams[1] = torch.cat([one["out"] for one in wanted])
        for name, target, rank in (("heads", "attended", ranks[number]), ("neurons", "out", 0)):
            writer = layer.self_attn.o_proj if name == "heads" else layer.mlp.down_proj
            gram, cross, lost, energy = 0.0, 0.0, 0.0, 0.0
            for x, goal in zip(streams[0].split(TOGETHER), wanted, strict=True):
                own = _pass(layer, x, named)
                rows, residual = own[name].flatten(0, 1), (goal[target] - own[target]).flatten(0, 1)
                gram = gram + (rows.T @ rows).double()
                cross = cross + (rows.T @ residual).double()
                lost += float(residual.square().sum())
                energy += float(goal[target].square().sum())
            writer.weight.data += share * _change(writer.weight, gram, cross, rank)
        distances.append(lost / energy)
        streams[0] = torch.cat([_pass(layer, x, named)["out"] for x in streams[0].split(TOGETHER)])
    return distances


def _pass(layer: Any, x: torch.Tensor, named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a layer's writers read, and the stream behind attention and behind the layer."""
    seen: dict[str, torch.Tensor] = {}
    places = {
        "heads": layer.self_attn.o_proj,
        "attended": layer.post_attention_layernorm,
        "neurons": layer.mlp.down_proj,
    }
    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
        for name, module in places.items()
    ]
    seen["out"] = layer(x, **named)
    for handle in handles:
        handle.remove()
    return seen


def _change(weight: torch.Tensor, gram: Any, cross: Any, rank: int) -> torch.Tensor:
    """Return the ridge regression `(d, n)` of the residual on what a writer reads, by `Aᵀ A` and `Aᵀ residual`.

    With a rank it is a change of what the writer makes of its `rank` coordinates `V`.
    """
    basis = None
    if rank:
        basis = torch.linalg.svd(weight.double(), full_matrices=False).Vh[:rank].T
        gram, cross = basis.T @ gram @ basis, basis.T @ cross
    solved = ridge(gram, cross, DAMPING)
    return (solved if basis is None else basis @ solved).T.to(weight)
