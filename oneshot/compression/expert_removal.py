"""Removal of whole experts: contributions are summed under the routing as it is, then the router loses its rows.

After it the layer is routed otherwise, so the statistics of the experts that stay are taken again (`experts`).
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch

from oneshot.architecture import Experts, cut
from oneshot.compression.expert_scores import ExpertSums, GateRule, Routed, outputs_of, removed_experts, route
from oneshot.compression.sublayer import SublayerTask
from oneshot.errors import CheckpointError
from oneshot.stream import Layer, Routing, States
from oneshot.tensors import Tensors

logger = logging.getLogger(__name__)

TOKENS_TOGETHER = 4096  # whose effects are summed at once
GATE_TOLERANCE = 2e-2  # of 16-bit gates
NAMED_EXPERTS = 8


def measure_effects(task: SublayerTask, states: States, current: Layer) -> ExpertSums:
    """Sum over the text what every expert contributes, and what its removal would change.

    Raises `CheckpointError` if the stock router weighs experts otherwise than its family's description says.
    """
    assert task.shape.experts is not None
    sums = ExpertSums(task.shape.experts.count, task.machine.device)
    for x, _ in states.read():
        add_effects_(sums, task, current, current.route(task.index, x))
    return sums.of_all(task.machine.workers)


def add_effects_(sums: ExpertSums, task: SublayerTask, layer: Layer, routing: Routing) -> None:
    """Add a batch on its way through a layer to the sums. Raises as `measure_effects`."""
    mixer: Experts = task.mixer
    factors = None
    if mixer.expert_scale is not None:
        factors = layer.tensor(mixer.expert_scale).float()
    parts = routing.inputs, routing.logits, routing.gates, routing.chosen, routing.mixed, routing.written
    pieces = zip(*(part.split(TOKENS_TOGETHER) for part in parts), strict=True)
    for inputs, logits, gates, chosen, mixed, written in pieces:
        scores = logits.double().softmax(-1) if mixer.scores == "softmax" else logits.double().sigmoid()
        bias = None if mixer.chosen_by is None else layer.tensor(mixer.chosen_by)
        preference = scores if bias is None else scores + bias
        routed = route(scores, chosen.shape[1], _gate_rule(mixer), preference, chosen)
        plain = gates / mixer.scale
        known = _gates_match(routed, chosen, plain if factors is None else plain / factors[chosen])
        if not known & _are_preferred(preference, chosen, _rounding(logits, scores, bias)):
            raise CheckpointError(
                f"The router of layer {task.layer} weighs experts otherwise than known for this family, so none can be "
                "removed; use --set experts=none, and please report this with the input's config.json."
            )
        outputs = outputs_of(routed, inputs, routing.output)
        if factors is not None:
            outputs *= factors[routed.experts].unsqueeze(-1)
        seen = partial(_seen, task, layer, mixed, written) if mixer.branches is not None else None
        sums.add_(routed, outputs, seen)


def _seen(
    task: SublayerTask, layer: Layer, mixed: torch.Tensor, written: torch.Tensor, effects: torch.Tensor
) -> torch.Tensor:
    """Return what the stream loses if the experts' output `mixed (t, D)` loses each of `effects (t, k, D)`.

    Norms follow this output, and what the whole mixture wrote.
    """
    after, index = partial(layer.after_experts, task.mixer), task.index
    beside = written - after(mixed)
    left = beside.unsqueeze(1) + after(mixed.unsqueeze(1) - effects)
    return (layer.added(index, written).unsqueeze(1) - layer.added(index, left)).float()


def _gate_rule(mixer: Experts) -> GateRule:
    """Return how a mixture makes gates from the scores of a token's experts."""
    if mixer.renormalises:
        return "normalised"
    return "softmax" if mixer.scores == "softmax" else "independent"


def _gates_match(routed: Routed, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return whether the stock router gives the experts that it chose these gates `(t, k)`."""
    theirs = gates.float().gather(1, chosen.argsort(dim=1))
    ours = routed.gates.gather(1, routed.experts[:, :-1].argsort(dim=1))
    return torch.isclose(ours, theirs, rtol=GATE_TOLERANCE, atol=GATE_TOLERANCE).all()


def _are_preferred(preference: torch.Tensor, chosen: torch.Tensor, rounding: torch.Tensor) -> torch.Tensor:
    """Return whether no other expert is preferred `(t, E)` to a chosen one by more than the rounding `(t,)`.

    Near ties may be chosen either way.
    """
    least = preference.gather(1, chosen).amin(1)
    others = preference.scatter(1, chosen, -torch.inf).amax(1)
    return (others - least <= rounding).all()


def _rounding(logits: torch.Tensor, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return by how much roundings of the stock router change the difference of two preferences, `(t,)`.

    It may round logits, scores and biases to the dtypes that it has them in.
    """
    rounding = torch.finfo(logits.dtype).eps * (1 + logits.abs().amax(1)) * scores.amax(1)
    if bias is not None:
        rounding += torch.finfo(bias.dtype).eps * bias.abs().max()
    return 2 * rounding


def keep_experts(task: SublayerTask, tensors: Tensors, sums: ExpertSums) -> tuple[Tensors, torch.Tensor]:
    """Return the layer with the experts that stay, and with their rows of the router; one worker chooses, for all.

    Also return the numbers of these experts.
    """
    count, selector, kept_count = len(sums.tokens), task.method.experts, task.kept.num_experts
    assert selector != "none"
    assert kept_count is not None

    def choose() -> torch.Tensor:
        generator = torch.Generator().manual_seed(task.seed + task.layer)
        removed = removed_experts(selector, sums, count - kept_count, generator)
        return torch.tensor([expert for expert in range(count) if expert not in removed])

    kept = task.shared(choose)
    return cut(tensors, task.mixer.axes(task.shape), {"experts": kept}), kept


def warn_of_removed(task: SublayerTask, kept: torch.Tensor, sums: ExpertSums) -> None:
    """Warn of removed experts that the text says little or nothing about, by their numbers in the input."""
    removed = sorted(set(range(len(sums.tokens))).difference(kept.tolist()))
    tokens = {expert: int(rows) for expert, rows in enumerate(sums.tokens.tolist())}
    rare = [expert for expert in removed if tokens[expert] < task.dense_units]
    if rare:
        logger.warning(
            "Layer %d: %d of the %d removed experts (%s) got fewer calibration tokens than their %d neurons, and "
            "%d none, so text of another kind may need them; give text of every kind that the model is for.",
            *(task.number, len(rare), len(removed), named_experts(rare), task.dense_units),
            sum(not tokens[expert] for expert in rare),
        )


def named_experts(experts: Sequence[int]) -> str:
    """Return the numbers of experts, the first ones of many."""
    return ", ".join(map(str, experts[:NAMED_EXPERTS])) + (", …" if len(experts) > NAMED_EXPERTS else "")
