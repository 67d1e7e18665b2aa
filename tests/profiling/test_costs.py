"""How processes share out a profile: what each has to compute, of models that are only described."""

import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig
from worker_threads import run_in_threads

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
from gpu_estimate import Described

from oneshot.checkpoint import Model, identify, open_model
from oneshot.machine.sharing import Loads
from oneshot.pipeline import profile
from oneshot.profiling.costs import Task, layer_costs
from oneshot.profiling.layer_profile import LayerProfile

KINDS = ("ffn", "rank")  # of the per-layer form


def costs_of(model: Model, layer: int) -> dict[Task, float]:
    """Return the costs of a layer that is only described."""
    stack = model.family.stack_of(layer)
    shapes = stack.tensors(model.shape.of(layer).layer(layer))
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return layer_costs(stack, tensors, KINDS, with_ranks=True)


@pytest.mark.parametrize(("name", "at_once"), [("8B", 1.8), ("70B", 1.8)])
def test_four_processes_share_a_profile(name: str, at_once: float) -> None:
    """The work of all ÷ the largest share, and ÷ what is waited for: an FFN is one task, and every layer waits."""
    model, loads, waited = identify(Described(name)), Loads(4), 0.0
    for layer in range(model.shape.num_hidden_layers):
        loads.begin_stage()
        loads.share_out([*costs_of(model, layer).values()])
        waited += max(loads.stage)
    assert sum(loads.whole) / max(loads.whole) >= 3
    assert sum(loads.whole) / waited >= at_once


def test_every_task_is_computed_by_one_process(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What three processes compute of a layer is at most 4/3 of the best of all ways to share it out."""
    config = make_config(make_checkpoint(layers=2), output=tmp_path / "profile", form="per-layer", round_to=4)
    computed = defaultdict[tuple[int, int], list[Task]](list)  # by layer and thread
    of_ffn, of_ranks = LayerProfile.ffn, LayerProfile.ranks

    def ffn(self: Any, *arguments: Any) -> None:
        computed[self._layer, get_ident()].append((1, None))
        of_ffn(self, *arguments)

    def ranks(self: Any, index: int, linears: Any, *arguments: Any) -> None:
        computed[self._layer, get_ident()].extend((index, kind) for kind in linears)
        of_ranks(self, index, linears, *arguments)

    monkeypatch.setattr(LayerProfile, "ffn", ffn)
    monkeypatch.setattr(LayerProfile, "ranks", ranks)
    run_in_threads(3, lambda: profile(config))
    model = open_model(str(config.checkpoint), tmp_path)
    for layer in range(2):
        costs = costs_of(model, layer)
        shares = [tasks for (number, _), tasks in computed.items() if number == layer]
        done = [task for tasks in shares for task in tasks]
        assert sorted(map(str, done)) == sorted(str(task) for task, cost in costs.items() if cost)
        largest = max(sum(costs[task] for task in tasks) for tasks in shares)
        assert largest <= 4 / 3 * best_share([costs[task] for task in done], 3) * (1 + 1e-12)


def best_share(costs: list[float], size: int) -> float:
    """Return the smallest possible largest share, from all ways to share out."""
    return min(
        max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == own) for own in range(size))
        for owners in product(range(size), repeat=len(costs))
    )
