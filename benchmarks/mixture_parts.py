"""Mixtures in memory with parts removed: stock models whose tensors are smaller, and corrections in closed form.

For `mixtures.py`. The corrections are references in float64 for small models: `separable` shares a token's residual
among its experts and solves for each expert, `joint` solves for all experts of a layer at once.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from mixture_hope import PairSums
from torch import nn

from oneshot.compression.expert_scores import ExpertSums, GateRule, outputs_of, route

Correction = Literal["none", "separable", "joint"]
RouterStep = Callable[[Any, Any, torch.Tensor, torch.Tensor], None]
"""Correct the router of a block with a config, from its inputs and what it should write, both `(tokens, D)`."""

DAMPING = 1e-2  # ridge in units of the Gram's mean diagonal
LEAST_TOKENS = 16  # a neuron, below which the dense stream's residual is left out
BATCH = 4096  # tokens of a batch of statistics


def load_stock(folder: Path) -> Any:
    """Return a checkpoint as its stock class, float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def gate_rule(config: Any) -> GateRule:
    """Return how a stock mixture makes its gates."""
    normalised = config.model_type == "mixtral" or config.norm_topk_prob
    return "normalised" if normalised else "softmax"


def one_expert(block: Any) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Return an expert's output from its number and its inputs `(n, D)`, by the stock experts with a gate of 1."""
    return lambda expert, rows: block.experts(
        rows, torch.full((len(rows), 1), expert), torch.ones(len(rows), 1, dtype=rows.dtype)
    )


def one_by_one(block: Any) -> Callable[[range, torch.Tensor], torch.Tensor]:
    """Return what `outputs_of` calls: outputs of experts from their numbers and their inputs `(n, r, D)`."""
    own = one_expert(block)
    return lambda experts, rows: torch.stack([own(expert, each) for expert, each in zip(experts, rows, strict=True)])


def neurons_of(block: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """Return an expert's neurons `(n, m)` of its inputs `(n, D)`."""
    gate, up = nn.functional.linear(rows, block.experts.gate_up_proj[expert]).chunk(2, dim=-1)
    return block.experts.act_fn(gate) * up


def layer_inputs(model: Any, windows: torch.Tensor) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Return the first layer's input `(n, L, D)` and every layer's other arguments."""
    first: list[torch.Tensor] = []
    others: list[dict[str, Any]] = []

    def record(_: nn.Module, given: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
        if not first:
            first.append(given[0])
        others.append({name: value for name, value in named.items() if name != "past_key_values"})

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in model.model.layers]
    model.model(windows, use_cache=False)
    for handle in handles:
        handle.remove()
    return first[0], others


def with_input(layer: Any, states: torch.Tensor, named: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's output `(n, L, D)` and the input of its experts `(n L, D)`."""
    seen: list[torch.Tensor] = []
    handle = layer.mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    output = layer(states, **named)
    handle.remove()
    return output, seen[0].flatten(0, 1)


def routed_batches(block: Any, config: Any, inputs: torch.Tensor) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield batches of inputs and how they are routed."""
    for rows in inputs.split(BATCH):
        scores = nn.functional.linear(rows, block.gate.weight).double().softmax(-1)
        yield rows, route(scores, config.num_experts_per_tok, gate_rule(config))


@dataclass
class LayerSums:
    """Sums over the text at a layer: of experts, of pairs of experts, and of neurons in the output.

    Attributes:
        energies: `Σ g² h² ‖w‖²` `(E, m)`.
    """

    experts: ExpertSums
    pairs: PairSums
    energies: torch.Tensor


def sums_of_layers(model: Any, windows: torch.Tensor) -> list[LayerSums]:
    """Return every layer's sums."""
    states, others = layer_inputs(model, windows)
    sums = []
    for layer, named in zip(model.model.layers, others, strict=True):
        states, inputs = with_input(layer, states, named)
        num_experts, _, width = layer.mlp.experts.down_proj.shape
        of_layer, pairs = ExpertSums(num_experts), PairSums(num_experts)
        energy = torch.zeros(num_experts, width, dtype=torch.float64)
        for rows, routed in routed_batches(layer.mlp, model.config, inputs):
            outputs = outputs_of(routed, rows, one_by_one(layer.mlp))
            of_layer.add_(routed, outputs)
            pairs.add_(routed, outputs)
            for expert in range(num_experts):
                tokens, places = (routed.experts[:, :-1] == expert).nonzero(as_tuple=True)
                gated = routed.gates[tokens, places, None] * neurons_of(layer.mlp, expert, rows[tokens])
                energy[expert] += gated.double().square().sum(0)
        sums.append(LayerSums(of_layer, pairs, energy * layer.mlp.experts.down_proj.double().square().sum(1)))
    return sums


def without_parts(
    model: Any, experts: Sequence[torch.Tensor] | None, neurons: Sequence[torch.Tensor] | None
) -> nn.Module:
    """Return the stock model with these parts of every layer.

    Args:
        experts: the kept experts of every layer `(E',)`, or None for all.
        neurons: the kept neurons of every expert of every layer `(E, m')`, or None for all.
    """
    config = copy.deepcopy(model.config)
    state = model.state_dict()
    for number in range(len(model.model.layers)):
        block = f"model.layers.{number}.mlp"
        router, gate_up, down = (
            f"{block}.{name}" for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
        )
        if experts is not None:
            for name in (router, gate_up, down):
                state[name] = state[name][experts[number]]
        if neurons is not None:
            places = neurons[number][:, :, None]
            halves = [half.gather(1, places.expand(-1, -1, half.shape[-1])) for half in state[gate_up].chunk(2, dim=1)]
            state[gate_up] = torch.cat(halves, dim=1)
            state[down] = state[down].gather(2, places.mT.expand(-1, state[down].shape[1], -1))
    for name in ("num_experts", "num_local_experts"):
        if name in config.to_dict():
            setattr(config, name, len(state[down]))
    width = "intermediate_size" if config.model_type == "mixtral" else "moe_intermediate_size"
    setattr(config, width, state[down].shape[-1])
    smaller = type(model)(config).eval()
    smaller.load_state_dict(state)
    return smaller


def correct_(
    smaller: Any,
    dense: Any,
    windows: torch.Tensor,
    how: Correction,
    residual_weight: float,
    experts: Sequence[torch.Tensor] | None,
    correct_router_: RouterStep | None = None,
) -> None:
    """Correct the downs of every layer's experts, layer by layer, towards what the dense layer gives.

    The target is the dense layer's own output on the smaller model's states, and beyond it a share `residual_weight` of
    the difference from the dense model's states. `experts` are the kept experts as in `without_parts`. The router comes
    first, if it is corrected.
    """
    if how == "none" and correct_router_ is None:
        return
    dense_states, others = layer_inputs(dense, windows)
    states = dense_states
    for number, (layer, reference, named) in enumerate(
        zip(smaller.model.layers, dense.model.layers, others, strict=True)
    ):
        dense_states = reference(dense_states, **named)
        output, inputs = with_input(layer, states, named)
        whole, written = reference.mlp(inputs[None])[0], layer.mlp(inputs[None])[0]
        beyond = residual_weight * ((dense_states - output).flatten(0, 1) - (whole - written))
        if correct_router_ is not None:
            correct_router_(layer.mlp, smaller.config, inputs, whole + beyond)
            written = layer.mlp(inputs[None])[0]
        if how == "joint":
            layer.mlp.experts.down_proj += joint_change(layer.mlp, smaller.config, inputs, whole - written + beyond)
        elif how == "separable":
            numbers = range(len(layer.mlp.gate.weight)) if experts is None else experts[number].tolist()
            change = separable_change(
                layer.mlp, reference.mlp, numbers, smaller.config, inputs, whole - written, beyond
            )
            layer.mlp.experts.down_proj += change
        states = layer(states, **named)


def separable_change(
    block: Any,
    reference: Any,
    numbers: Sequence[int],
    config: Any,
    inputs: torch.Tensor,
    lost: torch.Tensor,
    beyond: torch.Tensor,
) -> torch.Tensor:
    """Return the changes of the downs `(E', D, m)`, for each expert by itself.

    Of what is lost, an expert makes up for its own lost neurons. The rest, r, belongs to no expert: the smallest change
    of the outputs of a token's experts that gives it is `g_e r / Σ g²`. An expert fits both by ridge regression on its
    neurons, over its tokens weighted by `g_e²`.

    Args:
        reference: the dense block, where `numbers` are the experts' numbers.
    """
    num_experts, hidden, width = block.experts.down_proj.shape
    grams = torch.zeros(num_experts, width, width, dtype=torch.float64)
    crosses = torch.zeros(2, num_experts, width, hidden, dtype=torch.float64)
    counts = torch.zeros(num_experts)
    parts = zip(routed_batches(block, config, inputs), lost.split(BATCH), beyond.split(BATCH), strict=True)
    for (rows, routed), of_layer, of_stream in parts:
        rest, squares, arrivals = of_layer.clone(), routed.gates.square().sum(-1), []
        for expert, number in enumerate(numbers):
            tokens, places = (routed.experts[:, :-1] == expert).nonzero(as_tuple=True)
            gates = routed.gates[tokens, places, None]
            own = one_expert(reference)(number, rows[tokens]) - one_expert(block)(expert, rows[tokens])
            rest.index_add_(0, tokens, -gates * own)
            arrivals.append((tokens, gates, gates * own))
        for expert, (tokens, gates, own) in enumerate(arrivals):
            gated = gates * neurons_of(block, expert, rows[tokens])
            share = gates.square() / squares[tokens, None]
            grams[expert] += (gated.mT @ gated).double()
            crosses[0, expert] += (gated.mT @ (own + share * rest[tokens])).double()
            crosses[1, expert] += (gated.mT @ (share * of_stream[tokens])).double()
            counts[expert] += len(tokens)
    crosses[1, counts < LEAST_TOKENS * width] = 0
    changes = [ridge(gram, cross) for gram, cross in zip(grams, crosses.sum(0), strict=True)]
    return torch.stack(changes).mT.float()


def joint_change(block: Any, config: Any, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the changes of the downs `(E', D, m)`: ridge regression on the gated neurons of all experts together."""
    num_experts, hidden, width = block.experts.down_proj.shape
    gram = torch.zeros(num_experts * width, num_experts * width, dtype=torch.float64)
    cross = torch.zeros(num_experts * width, hidden, dtype=torch.float64)
    for (rows, routed), wanted in zip(routed_batches(block, config, inputs), residual.split(BATCH), strict=True):
        columns = torch.zeros(len(rows), num_experts, width)
        for expert in range(num_experts):
            tokens, places = (routed.experts[:, :-1] == expert).nonzero(as_tuple=True)
            columns[tokens, expert] = routed.gates[tokens, places, None] * neurons_of(block, expert, rows[tokens])
        gram += (columns.flatten(1).mT @ columns.flatten(1)).double()
        cross += (columns.flatten(1).mT @ wanted).double()
    return ridge(gram, cross).view(num_experts, width, hidden).mT.float()


def ridge(gram: torch.Tensor, cross: torch.Tensor, damping: float | None = None) -> torch.Tensor:
    """Return `(G + λI)⁻¹ C` with `λ = damping · mean(diag G)`, by default `DAMPING`, or 0 without any tokens."""
    damping = DAMPING if damping is None else damping
    level = float(gram.diagonal().mean())
    if level == 0:
        return torch.zeros_like(cross)
    factor = torch.linalg.cholesky(gram + damping * level * torch.eye(len(gram)).to(gram))
    return torch.cholesky_solve(cross, factor)
