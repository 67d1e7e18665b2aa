"""The correction of `up_proj` by least squares over the kept neurons, and of `down_proj` for what that changes."""

from dataclasses import replace

import torch

from oneshot.compression.correction import Factors
from oneshot.compression.statistics import batches_apart, with_constant_column
from oneshot.compression.sublayer import SublayerTask
from oneshot.linalg.conjugate_gradients import conjugate_gradients
from oneshot.linalg.psd import RidgeFactor
from oneshot.linalg.sums import add_gram_, add_product_, as_float32, finished_gram
from oneshot.stream import Layer, States

Tensors = dict[str, torch.Tensor]


def up_passes(task: SublayerTask, states: States) -> float:
    """Return how many passes over the text `correct_up` takes."""
    every = batches_apart(states.num_tokens, task.num_columns, states.dense_every)
    return (2 + task.method.up_steps) * states.share_read(every)


def correct_up(
    task: SublayerTask, tensors: Tensors, folded: Tensors, states: States, factors: Factors
) -> tuple[Tensors, Factors]:
    """Return the `folded` layer with a corrected `up_proj` and the `down_proj` that follows it, and its factors.

    Args:
        tensors: of the dense layer. factors: what `correct` solved for `folded`.

    The new factors state no error, because their statistics are those of the old `up_proj`.
    """
    mixer, machine = task.stack.ffn, task.machine
    dense, before = states.dense_layer(tensors), states.layer(folded)
    every = batches_apart(states.num_tokens, task.num_columns, states.dense_every)
    up_step = up_proj_step(
        states,
        task.index,
        dense,
        before,
        folded[f"{mixer.down}.weight"].to(machine.device, machine.dtype),
        steps=task.method.up_steps,
        every=every,
        residual_weight=factors.residual_weight,
        damping=task.method.fixed_damping,
    )
    up_step = task.shared(lambda: up_step)  # rounding would differ between workers
    up = folded[f"{mixer.up}.weight"]
    folded = folded | {f"{mixer.up}.weight": (up.to(up_step) + up_step).to(up)}
    down_step = down_proj_step(
        states,
        task.index,
        dense,
        before,
        states.layer(folded),
        factors.weight.shape,
        every=every,
        residual_weight=factors.residual_weight,
        damping=task.method.fixed_damping,
    )
    columns = torch.arange(factors.weight.shape[1], device=factors.kept_columns.device)
    weight = task.shared(lambda: factors.weight + down_step)
    factors = replace(factors, weight=weight, predicted_error=None)
    return task.fold(folded, replace(factors, kept_columns=columns)), factors


def target_rows(
    dense: Layer, index: int, h: torch.Tensor, dense_state: torch.Tensor | None, residual_weight: float
) -> torch.Tensor:
    """Return the target of `correction.correct` as rows `(tokens, D)`: the dense output and a share of the residual.

    Args:
        index: of the FFN in the layer. h: the compressed stream before the FFN.
        dense_state: the dense stream after the FFN; None without one.
    """
    output = dense.write(index, dense.inner(index, h))
    if dense_state is None:
        return output
    return torch.lerp(output, (dense_state - h).flatten(0, -2), residual_weight)


def up_proj_step(
    states: States,
    index: int,
    dense: Layer,
    current: Layer,
    down_proj: torch.Tensor,
    *,
    steps: int,
    every: int,
    residual_weight: float,
    damping: float,
) -> torch.Tensor:
    """Return what to add to `up_proj` for a smaller error of the FFN's output; gate and `down_proj` stay.

    The output `V (g ⊙ U x)` of kept neurons is linear in `U`. With its error `r` against the target of `down_proj`'s
    correction, conjugate gradients take `steps` steps towards `min Σ ‖r − V (g ⊙ ΔU x)‖²`, preconditioned by the
    Kronecker-factored curvature `(E[g gᵀ] ∘ VᵀV) ⊗ E[x xᵀ]` (K-FAC, Martens and Grosse, arXiv 1503.05671, section 3).

    Args:
        index: of the FFN in the layer. dense, current: the layer with all neurons, and with the kept ones.
        down_proj: `V (D, k)`. every: only each `every`-th batch is read. residual_weight: as in `correction.correct`.
        damping: ridge of both factors of the preconditioner.

    Returns:
        `ΔU (k, D)` float32. Cost: `1 + steps` passes of these batches through the FFN, forward and backward.
    """
    num_neurons, width = down_proj.shape[1], down_proj.shape[0]
    device, workers = down_proj.device, states.machine.workers
    gradient, gates_sum, inputs_sum = (
        torch.zeros(size, dtype=torch.float64, device=device)
        for size in ((num_neurons, width), (num_neurons, num_neurons), (width, width))
    )
    for h, dense_state in states.read(every):
        inputs, gates = current.gates(index, h)
        reached = current.write(index, current.inner(index, h))
        lost = target_rows(dense, index, h, dense_state, residual_weight) - reached
        add_product_(gradient, (lost @ down_proj).mul_(gates), inputs)
        add_gram_(gates_sum, gates)
        add_gram_(inputs_sum, inputs)
    workers.sum_(gradient, gates_sum, inputs_sum)
    gates_gram, inputs_gram = finished_gram(gates_sum), finished_gram(inputs_sum)
    del gates_sum, inputs_sum
    gates_factor = RidgeFactor(gates_gram.mul_(down_proj.float().T @ down_proj.float()), damping)
    inputs_factor = RidgeFactor(inputs_gram, damping)

    def curvature(direction: torch.Tensor) -> torch.Tensor:
        product, rows = torch.zeros(num_neurons, width, dtype=torch.float64, device=device), direction.to(down_proj).T
        for h, _ in states.read(every):
            inputs, gates = current.gates(index, h)
            moved = (inputs @ rows).mul_(gates) @ down_proj.T
            add_product_(product, (moved @ down_proj).mul_(gates), inputs)
        workers.sum_(product)
        return as_float32(product)

    def precondition(residual: torch.Tensor) -> torch.Tensor:
        return inputs_factor.solve(gates_factor.solve(residual).T).T.float()

    return conjugate_gradients(as_float32(gradient), curvature, precondition, steps=steps)


def down_proj_step(
    states: States,
    index: int,
    dense: Layer,
    before: Layer,
    current: Layer,
    size: torch.Size,
    *,
    every: int,
    residual_weight: float,
    damping: float,
) -> torch.Tensor:
    """Return what to add to `down_proj` after `up_proj` has changed.

    `down_proj` solved its least squares over all text, so that the gradient there was zero. Now it is what the change
    of `up_proj` made of it. That difference is measured on the batches that are read, which leaves out most of
    the noise of so few (a control variate), and one Newton step follows it.

    Args:
        before, current: the layer before `up_proj` changed, and after. size: `(D, k)`, with one column more for a bias.
        damping: ridge of the Newton step, that of the least squares. Others as in `up_proj_step`.

    Returns:
        `(D, k)` float64. Cost: one pass of these batches through the dense FFN and twice through the kept neurons.
    """
    output_size, num_columns = size
    device, workers = states.machine.device, states.machine.workers
    gram, change = (
        torch.zeros(num_columns, columns, dtype=torch.float64, device=device) for columns in (num_columns, output_size)
    )
    for h, dense_state in states.read(every):
        target = target_rows(dense, index, h, dense_state, residual_weight)
        old, new = (layer.inner(index, h) for layer in (before, current))
        lost_before, lost = target - before.write(index, old), target - current.write(index, new)
        if num_columns > new.shape[1]:
            old, new = with_constant_column(old), with_constant_column(new)
        add_gram_(gram, new)
        add_product_(change, new, lost)
        add_product_(change, old, -lost_before)
    workers.sum_(gram, change)
    return RidgeFactor(finished_gram(gram), damping).solve(as_float32(change)).T
