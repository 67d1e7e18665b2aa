"""Closed-form corrections of a router whose model lost experts, before the experts that stay are corrected.

For `mixtures.py`: references in float64 for small models whose gates are divided by their sum.

- `gain`: a factor for each expert that stays, by least squares; its down projection takes it.
- `ideal`: ridge regression of the router's logits towards gates that suit each token best.
- `newton`: one Gauss–Newton step of the router's rows towards the whole mixture's output.
- `kronecker`: the same with a Kronecker product in place of the Hessian, whose factors also fit large models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import torch
from mixture_parts import BATCH, one_by_one, one_expert, ridge, routed_batches
from torch import nn

from oneshot.compression.expert_scores import outputs_of

RouterCorrection = Literal["none", "gain", "ideal", "newton", "kronecker"]
LEAST_GATE = 0.02  # of the ideal ones, because their logarithms are fitted


def correct_router_(
    block: Any, config: Any, inputs: torch.Tensor, target: torch.Tensor, how: RouterCorrection, step: float
) -> None:
    """Correct the router of a block in place.

    Args:
        inputs: of the block, `(tokens, D)`. target: what the block should write, `(tokens, D)`.
        step: the share of the change that is made.
    """
    if how == "gain":
        block.experts.down_proj *= (1 + step * (gains(block, config, inputs, target) - 1)).float().view(-1, 1, 1)
    elif how != "none":
        change = {"ideal": rows_towards_ideal, "newton": newton_rows, "kronecker": kronecker_rows}[how]
        block.gate.weight += step * change(block, config, inputs, target).float()


def gains(block: Any, config: Any, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the factors `(E,)` of the experts' outputs with the least squared error, with a ridge towards 1."""
    num_experts = len(block.gate.weight)
    gram = torch.zeros(num_experts, num_experts, dtype=torch.float64)
    cross = torch.zeros(num_experts, 1, dtype=torch.float64)
    for (rows, routed), wanted in zip(routed_batches(block, config, inputs), target.split(BATCH), strict=True):
        chosen = routed.experts[:, :-1]
        parts = (routed.gates[..., None] * outputs_of(routed, rows, one_by_one(block))[:, :-1]).double()
        missing = wanted.double() - parts.sum(1)
        places = nn.functional.one_hot(chosen, num_experts).double()
        gram += torch.einsum("tie,tij,tjf->ef", places, parts @ parts.mT, places)
        cross += torch.einsum("tie,tid,td->e", places, parts, missing)[:, None]
    return 1 + ridge(gram, cross)[:, 0]


def rows_towards_ideal(block: Any, config: Any, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the change of the router's rows `(E, D)` by ridge regression towards ideal logits.

    The candidates of a token are the 2k experts with its largest logits. Logits of the k best give the ideal gates and
    keep the sum of their exponentials; those of other candidates are not above them.
    """
    hidden, num_experts = inputs.shape[1], len(block.gate.weight)
    gram = torch.zeros(hidden, hidden, dtype=torch.float64)
    cross = torch.zeros(hidden, num_experts, dtype=torch.float64)
    top_k = config.num_experts_per_tok
    for rows, wanted in zip(inputs.split(BATCH), target.split(BATCH), strict=True):
        logits = nn.functional.linear(rows, block.gate.weight).double()
        largest, candidates = logits.topk(min(2 * top_k, num_experts))
        of_one = one_expert(block)
        outputs = torch.stack([of_one(expert, rows) for expert in range(num_experts)], 1).double()
        of_candidates = outputs.gather(1, candidates[..., None].expand(-1, -1, hidden))
        gates = ideal_gates(of_candidates, wanted.double(), top_k)
        best = (gates + 1e-9 * largest.softmax(1)).topk(top_k).indices  # if fewer are enough, the largest logits
        chosen = gates.gather(1, best).clamp_min(LEAST_GATE)
        chosen = chosen / chosen.sum(1, keepdim=True)
        level = largest.gather(1, best).logsumexp(1, keepdim=True)
        ideal = torch.minimum(largest, (chosen.log() + level).amin(1, keepdim=True))
        ideal.scatter_(1, best, chosen.log() + level)
        change = torch.zeros_like(logits).scatter_(1, candidates, ideal - largest)
        gram += rows.double().mT @ rows.double()
        cross += rows.double().mT @ change
    return ridge(gram, cross).mT


def ideal_gates(outputs: torch.Tensor, wanted: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the gates of the best k of c experts: `min ‖y − Σ g_e o_e‖²` with `g ≥ 0` and `Σ g = 1`.

    It is exact: every set of at most k experts is solved with equality alone, and a solution counts if it is positive.

    Args:
        outputs: `(t, c, D)`. wanted: y `(t, D)`.

    Returns:
        float64 `(t, c)`.
    """
    tokens, count, _ = outputs.shape
    differences = (outputs - wanted[:, None]).double()
    gram = differences @ differences.mT  # of o_e − y: the error is gᵀ G g where gates add up to 1
    gram = gram + 1e-9 * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(count, dtype=torch.float64)
    best = torch.full((tokens,), torch.inf, dtype=torch.float64)
    gates = torch.zeros(tokens, count, dtype=torch.float64)
    for size in range(1, top_k + 1):
        for members in map(list, combinations(range(count), size)):
            own = gram[:, members][:, :, members]
            solution = torch.linalg.solve(own, torch.ones(tokens, size, 1, dtype=torch.float64))[..., 0]
            solution = solution / solution.sum(1, keepdim=True)
            error = torch.einsum("te,tef,tf->t", solution, own, solution)
            better = (solution >= 0).all(1) & (error < best)
            best = torch.where(better, error, best)
            found = torch.zeros_like(gates)
            found[:, members] = solution
            gates = torch.where(better[:, None], found, gates)
    return gates


@dataclass(frozen=True)
class Slopes:
    """State how the output of a batch of t tokens depends on the logits of each token's k experts.

    Which experts a token has is taken as given. The output `y = Σ g o` changes by `a_e = g_e (o_e − y)` with the logit
    of expert e.

    Attributes:
        inputs: x `(t, D)`. chosen: int64 `(t, k)`. products: `⟨a_e, a_f⟩` `(t, k, k)`. along: `⟨a_e, target − y⟩`
            `(t, k)`. All float64.
    """

    inputs: torch.Tensor
    chosen: torch.Tensor
    products: torch.Tensor
    along: torch.Tensor


def slopes_of(block: Any, config: Any, inputs: torch.Tensor, target: torch.Tensor) -> Iterator[Slopes]:
    """Yield the slopes of all batches."""
    for (rows, routed), wanted in zip(routed_batches(block, config, inputs), target.split(BATCH), strict=True):
        outputs, gates = outputs_of(routed, rows, one_by_one(block))[:, :-1].double(), routed.gates.double()[..., None]
        whole = (gates * outputs).sum(1, keepdim=True)
        slopes, missing = gates * (outputs - whole), (wanted.double() - whole[:, 0])[..., None]
        yield Slopes(rows.double(), routed.experts[:, :-1], slopes @ slopes.mT, (slopes @ missing)[..., 0])


def kronecker_rows(block: Any, config: Any, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the change of the router's rows `(E, D)` along `A⁻¹ C B⁻¹`, by the length with the least squared error.

    `A = mean ⟨a_e, a_f⟩` over tokens, `B = mean x xᵀ`, and C is minus the gradient, as in Martens and Grosse (2015,
    1503.05671).
    """
    hidden, num_experts = inputs.shape[1], len(block.gate.weight)
    of_experts = torch.zeros(num_experts, num_experts, dtype=torch.float64)
    of_inputs = torch.zeros(hidden, hidden, dtype=torch.float64)
    cross = torch.zeros(num_experts, hidden, dtype=torch.float64)
    for one in slopes_of(block, config, inputs, target):
        places = nn.functional.one_hot(one.chosen, num_experts).double()
        of_experts += torch.einsum("tie,tij,tjf->ef", places, one.products, places)
        of_inputs += one.inputs.mT @ one.inputs
        cross += torch.einsum("tie,ti,td->ed", places, one.along, one.inputs)
    direction = ridge(of_inputs / len(inputs), ridge(of_experts, cross).mT).mT
    squared = 0.0
    for one in slopes_of(block, config, inputs, target):
        moved = (one.inputs @ direction.mT).gather(1, one.chosen)
        squared += float(torch.einsum("ti,tij,tj->", moved, one.products, moved))
    return direction * ((direction * cross).sum() / max(squared, torch.finfo(torch.float64).tiny))


def newton_rows(block: Any, config: Any, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the Gauss–Newton change of the router's rows `(E, D)`."""
    hidden, num_experts = inputs.shape[1], len(block.gate.weight)
    gram = torch.zeros(num_experts, num_experts, hidden, hidden, dtype=torch.float64)
    cross = torch.zeros(num_experts, hidden, dtype=torch.float64)
    for one in slopes_of(block, config, inputs, target):
        chosen, x, products, along = one.chosen, one.inputs, one.products, one.along
        for first in range(num_experts):
            tokens, places = (chosen == first).nonzero(as_tuple=True)
            cross[first] += along[tokens, places] @ x[tokens]
            for other in range(chosen.shape[1]):
                weighted = products[tokens, places, other, None] * x[tokens]
                for second in chosen[tokens, other].unique().tolist():
                    both = chosen[tokens, other] == second
                    gram[first, second] += weighted[both].mT @ x[tokens[both]]
    whole_gram = gram.permute(0, 2, 1, 3).reshape(num_experts * hidden, num_experts * hidden)
    return ridge(whole_gram, cross.view(-1, 1)).view(num_experts, hidden)
