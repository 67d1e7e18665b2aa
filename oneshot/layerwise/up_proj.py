"""The correction of `up_proj`: what `down_proj` could not make up for, by least squares over the kept neurons."""

from collections.abc import Callable

import torch
from oneshot_kernels import cross_gram_, gram_

from oneshot.layerwise.streams import Streams
from oneshot.linalg.conjugate_gradients import conjugate_gradients
from oneshot.linalg.psd import RidgeFactor
from oneshot.stream import StreamLayer


def wanted_output(
    dense: StreamLayer, h: torch.Tensor, dense_state: torch.Tensor | None, residual_weight: float
) -> torch.Tensor:
    """The target of `factorise.correct` as rows `(tokens, D)`: the dense FFN's output, and a share of the residual.

    Args:
        h: the compressed stream before the FFN. dense_state: the dense one behind it, where it is there.
    """
    output = dense.project_neurons(dense.neurons(h))
    if dense_state is None:
        return output
    return torch.lerp(output, (dense_state - h).flatten(0, -2), residual_weight)


def up_proj_step(
    streams: Streams,
    dense: StreamLayer,
    current: StreamLayer,
    down_proj: torch.Tensor,
    *,
    steps: int,
    every: int,
    residual_weight: float,
    damping: float,
    advance: Callable[[float], None],
) -> torch.Tensor:
    """What to add to `up_proj` for a smaller error of the FFN's output; gate and `down_proj` stay as they are.

    The output `V (g ⊙ U x)` of kept neurons is linear in `U`. With `r` its error against the target of `down_proj`'s
    correction, `steps` steps of conjugate gradients go towards `min Σ ‖r − V (g ⊙ ΔU x)‖²`, preconditioned by the
    Kronecker-factored curvature `(E[g gᵀ] ∘ VᵀV) ⊗ E[x xᵀ]` (K-FAC, Martens and Grosse, arXiv 1503.05671, section 3).

    Args:
        dense, current: the layer with all neurons of the dense model, and with those kept. down_proj: `V (D, k)`.
        every: the batches that are read: each `every`-th. residual_weight: as in `factorise.correct`.
        damping: ridge of both factors of the preconditioner. advance: hears of tokens that were read.

    Returns:
        `ΔU (k, D)` float32. Cost: `1 + steps` passes of that text through the FFN, forth and back.
    """
    num_neurons, width = down_proj.shape[1], down_proj.shape[0]
    device, workers = down_proj.device, streams.workers
    gradient = torch.zeros(num_neurons, width, device=device)
    gates_gram = torch.zeros(num_neurons, num_neurons, device=device)
    inputs_gram = torch.zeros(width, width, device=device)
    for _, h, dense_state in streams.read(every):
        inputs, gates = current.gates(h)
        lost = wanted_output(dense, h, dense_state, residual_weight) - current.project_neurons(current.neurons(h))
        cross_gram_(gradient, (lost @ down_proj).mul_(gates), inputs)
        gram_(gates_gram, gates)
        gram_(inputs_gram, inputs)
        advance(len(inputs))
    workers.sum_(gradient, gates_gram, inputs_gram)
    gates_factor = RidgeFactor(gates_gram.mul_(down_proj.float().T @ down_proj.float()), damping)
    inputs_factor = RidgeFactor(inputs_gram, damping)

    def curvature(direction: torch.Tensor) -> torch.Tensor:
        found, rows = torch.zeros_like(gradient), direction.to(down_proj).T
        for _, h, _ in streams.read(every):
            inputs, gates = current.gates(h)
            moved = (inputs @ rows).mul_(gates) @ down_proj.T
            cross_gram_(found, (moved @ down_proj).mul_(gates), inputs)
            advance(len(inputs))
        workers.sum_(found)
        return found

    def precondition(residual: torch.Tensor) -> torch.Tensor:
        return inputs_factor.solve(gates_factor.solve(residual).T).T.float()

    return conjugate_gradients(gradient, curvature, precondition, steps=steps)
