"""The correction of `up_proj` by least squares over the kept neurons, after `down_proj` was corrected."""

from dataclasses import replace

import torch

from oneshot.compression.correction import Factors, correct
from oneshot.compression.fold import augmented_weight, fold_sublayer
from oneshot.compression.statistics import GramAccumulator, with_constant_column
from oneshot.compression.sublayer import LayerWork, SublayerTask
from oneshot.linalg.conjugate_gradients import conjugate_gradients
from oneshot.linalg.psd import RidgeFactor
from oneshot.linalg.sums import add_gram_, add_product_, as_float32, finished_gram
from oneshot.method import TOKENS_PER_NEURON
from oneshot.stream import Layer, States
from oneshot.tensors import Tensors

UP_BATCHES = 2  # one of so many batches corrects `up_proj`


def batches_apart(task: SublayerTask, states: States) -> int:
    """Return n if every n-th batch corrects `up_proj`; 1 if fewer batches had too few tokens for the neurons."""
    needed = TOKENS_PER_NEURON * task.num_columns
    return UP_BATCHES if states.stack_tokens >= UP_BATCHES * needed else 1


def up_passes(task: SublayerTask, states: States) -> float:
    """Return how many passes over the text `correct_up` takes."""
    return 1 + (1 + task.method.up_steps) * states.share_read(batches_apart(task, states))


def correct_up(task: SublayerTask, tensors: Tensors, work: LayerWork, states: States) -> Factors:
    """Correct `up_proj` of the folded layer in `work`, and solve its output linear again; return the linear's factors.

    An `up_proj` of low rank keeps what it reads. The factors state no error, because their statistics measure against
    a part of the target. `tensors` are the dense layer's.
    """
    # 1. Steps of `up_proj` towards the target.
    mixer = task.stack.ffn
    dense, machine, folded = states.dense_layer(task.layer, tensors), task.machine, work.working
    low_rank = work.ranks.get(task.index, {}).get("up")
    share = task.residual_weight(task.num_columns, round(states.stack_tokens * states.dense_share))
    step = up_proj_step(
        states,
        task.index,
        dense,
        states.layer(task.layer, folded),
        folded[f"{mixer.down}.weight"].to(machine.device, machine.dtype),
        steps=task.method.up_steps,
        every=batches_apart(task, states),
        residual_weight=share,
        damping=task.method.fixed_damping,
        read=None if low_rank is None else low_rank.inputs,
    )
    step = task.shared(lambda: step)  # rounding would differ between workers
    up = folded[f"{mixer.up}.weight"]
    if low_rank is None:
        moved = (up.to(step) + step).to(up)
    else:
        low_rank = replace(low_rank, outputs=low_rank.outputs + step)
        work.ranks[task.index] = work.ranks[task.index] | {"up": low_rank}
        moved = low_rank.whole(up.dtype).to(up.device)
    folded = folded | {f"{mixer.up}.weight": moved}
    # 2. Statistics of the moved neurons.
    current, weight = states.layer(task.layer, folded), augmented_weight(folded, mixer.down).to(machine.device)
    has_bias = f"{mixer.down}.bias" in folded
    accumulator = GramAccumulator(weight.shape[1], output_size=weight.shape[0], device=machine.device)
    if states.has_dense:
        share /= states.dense_share  # batches of the dense stream stand for the others
    for h, dense_state in states.read():
        neurons = current.inner(task.index, h)
        lost = target_rows(dense, task.index, h, dense_state, share) - current.write(task.index, neurons)
        accumulator.update_(with_constant_column(neurons) if has_bias else neurons, lost)
    statistics = accumulator.finish(machine.workers)
    # 3. `down_proj` again, over all kept neurons.
    columns, damping = torch.arange(weight.shape[1], device=machine.device), task.method.fixed_damping
    shrinkage = task.shrinkage(weight.shape[1], statistics.num_rows)
    factors = task.shared(
        lambda: correct(weight, columns, statistics, correction="two-stream", damping=damping, shrinkage=shrinkage)
    )
    work.working = fold_sublayer(folded, task.sublayer, task.shape, factors)
    return replace(factors, predicted_error=None)


def target_rows(
    dense: Layer, index: int, h: torch.Tensor, dense_state: torch.Tensor | None, residual_weight: float
) -> torch.Tensor:
    """Return the target of `correction.correct` as rows `(tokens, D)`: the dense output and a share of the residual.

    Args:
        index: the FFN's index in the layer. h: the compressed stream before the FFN.
        dense_state: the dense stream after the FFN; None without one.
    """
    output = dense.write(index, dense.inner(index, h))
    if dense_state is None:
        return output
    return torch.lerp(output, dense.before_sum((dense_state - h).flatten(0, -2)), residual_weight)


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
    read: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what to add to `up_proj`, or to its outputs of low rank, for a smaller error of the FFN's output.

    Gate and `down_proj` stay.
    The output `V (g ⊙ U x)` of kept neurons is linear in `U`. With its error `r` against the target of `down_proj`'s
    correction, conjugate gradients take `steps` steps towards `min Σ ‖r − V (g ⊙ ΔU x)‖²`, preconditioned by the
    Kronecker-factored curvature `(E[g gᵀ] ∘ VᵀV) ⊗ E[x xᵀ]` (K-FAC, Martens and Grosse, arXiv 1503.05671, section 3).

    Args:
        index: the FFN's index in the layer. dense, current: the layer with all neurons, and with the kept ones.
        down_proj: `V (D, k)`. every: only each `every`-th batch is read. residual_weight: as in `correction.correct`.
        damping: ridge of both factors of the preconditioner.
        read: `R (r, D)` float32 of an `up_proj` of low rank, which is linear in `R x`; None of a whole one.

    Returns:
        `ΔU (k, D)`, or `(k, r)` of low rank; float32. Cost: `1 + steps` passes of these batches through the FFN,
        forward and backward.
    """

    def read_by_up(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, gates = current.gates(index, h)
        return inputs if read is None else inputs @ read.to(inputs).T, gates

    # 1. The gradient, and the Grams of gates and inputs.
    num_neurons, width = down_proj.shape[1], down_proj.shape[0] if read is None else len(read)
    device, workers = down_proj.device, states.machine.workers
    gradient, gates_sum, inputs_sum = (
        torch.zeros(size, dtype=torch.float64, device=device)
        for size in ((num_neurons, width), (num_neurons, num_neurons), (width, width))
    )
    for h, dense_state in states.read(every):
        inputs, gates = read_by_up(h)
        reached = current.write(index, current.inner(index, h))
        lost = target_rows(dense, index, h, dense_state, residual_weight) - reached
        add_product_(gradient, (lost @ down_proj).mul_(gates), inputs)
        add_gram_(gates_sum, gates)
        add_gram_(inputs_sum, inputs)
    workers.sum_(gradient)
    workers.sum_grams_(gates_sum, inputs_sum)
    gates_gram, inputs_gram = finished_gram(gates_sum), finished_gram(inputs_sum)
    del gates_sum, inputs_sum
    # 2. The factors of the preconditioner.
    curvature_of_gates = gates_gram.mul_(down_proj.float().T @ down_proj.float())
    gates_factor = RidgeFactor(curvature_of_gates, damping, "gates of kept neurons")
    inputs_factor = RidgeFactor(inputs_gram, damping, "inputs of up_proj")

    # 3. Conjugate gradients, with a pass through the text for every product.
    def curvature(direction: torch.Tensor) -> torch.Tensor:
        product, rows = torch.zeros(num_neurons, width, dtype=torch.float64, device=device), direction.to(down_proj).T
        for h, _ in states.read(every):
            inputs, gates = read_by_up(h)
            moved = (inputs @ rows).mul_(gates) @ down_proj.T
            add_product_(product, (moved @ down_proj).mul_(gates), inputs)
        workers.sum_(product)
        return as_float32(product)

    def precondition(residual: torch.Tensor) -> torch.Tensor:
        return inputs_factor.solve(gates_factor.solve(residual).T).T.float()

    return conjugate_gradients(as_float32(gradient), curvature, precondition, steps=steps)
