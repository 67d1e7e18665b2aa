"""Profiles of mixtures: one curve for all experts of a layer, against least squares over the tokens of each."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arrivals import by_expert
from factories import MakeCheckpoint, MakeConfig, cpu_machine
from families.cases import CASES, variants

from oneshot import Footprint
from oneshot.checkpoint import open_model
from oneshot.compression.branch_norm import MixtureNorms
from oneshot.compression.curvature import Curvature
from oneshot.compression.expert_statistics import ExpertAccumulator, ExpertStatistics
from oneshot.compression.experts import MeasuredExperts
from oneshot.footprint import predict_footprint
from oneshot.machine import Workers
from oneshot.pipeline import compress, profile
from oneshot.profiling.expert_profile import MixtureSums, NarrowerExperts, experts_task, join, narrow
from oneshot.stream import LayerBuilder, States

WIDTH = 32


def missed(rows: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor) -> tuple[float, float]:
    """Return the squared error of the best linear over the kept columns, and the energy of the output."""
    columns, target = rows.double().numpy(), (rows.double() @ weight.double().T).numpy()
    found = columns[:, kept.numpy()]
    rest = target - found @ np.linalg.lstsq(found, target, rcond=None)[0]
    return float((rest**2).sum()), float((target**2).sum())


@pytest.mark.parametrize(("name", "weighs"), [("glm4_moe", True), ("gpt_oss", False), ("gemma4_text-experts", True)])
@torch.inference_mode()
def test_a_curve_is_least_squares_with_the_neurons_of_a_run(
    name: str, weighs: bool, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """At every width of a run, in the metric of output curvature; a shared expert of the same width is one more.

    Where norms follow the experts, tokens count as these scale them.
    """
    options = variants()[name] | ({"layers": 1, "first_k_dense_replace": 0} if name == "glm4_moe" else {})
    model, machine = open_model(str(make_checkpoint(**options)), tmp_path), cpu_machine(tmp_path)
    layer, tensors = LayerBuilder(model, machine, 24).layer(0, model.read_layer(0)), model.read_layer(0)
    x = torch.randn(120, 24, 32, generator=torch.Generator().manual_seed(0))
    rows, curvature = torch.randn(40, 32, generator=torch.Generator().manual_seed(1)), None
    metric = rows.T @ rows if weighs else torch.eye(32)
    if weighs:
        measured = Curvature(tmp_path)
        measured.save(0, {"ffn": metric})
        curvature = measured.of_layer(0, machine.device)
    root = torch.linalg.cholesky(metric.double()).T
    sums = MixtureSums(experts_task(model, machine, 0, WIDTH // 2), tensors, ("ffn",))
    torch.testing.assert_close(
        layer.added(1, sums.update_(layer, x)).view_as(x), layer.sum(1, x) - x, rtol=1e-4, atol=1e-4
    )
    statistics, routing = sums.statistics(machine.workers), layer.route(1, x)
    assert statistics is not None
    measured = NarrowerExperts(experts_task(model, machine, 0, WIDTH // 2, curvature), tensors)
    measured.add_(statistics)
    errors = measured.errors
    assert errors.shape == (WIDTH + 1,)
    assert float(errors[0]) == 1
    assert float(errors[-1]) == 0
    norms = MixtureNorms.of(model.family.stack_of(0), tensors, machine.device)
    scales = torch.ones(len(routing.inputs), 1)
    if norms is not None:
        scales = norms.scales(layer, routing.mixed, routing.written)
    downs = next(tensor for tensor_name, tensor in tensors.items() if tensor_name.endswith("experts.down_proj"))
    for width in (8, 16, 24):
        task = experts_task(model, machine, 0, width, curvature)
        kept, factors, _ = task.solve(tensors, MeasuredExperts(statistics, (), torch.Generator()))
        parts = [
            missed(
                one.neurons * one.gates.unsqueeze(1) * scales[one.tokens],
                root @ downs[one.expert].double(),
                kept[one.expert],
            )
            for one in by_expert(routing)
        ]
        if factors.shared is not None:
            down = root @ tensors["mlp.shared_experts.down_proj.weight"].double()
            parts.append(missed(layer.shared_neurons(routing.inputs), down, factors.shared.kept_columns))
        lost, energy = np.array(parts).sum(0)
        assert float(errors[width]) == pytest.approx(lost / energy, rel=1e-3)
        # the error of the corrections with their ridges is a little larger
        _, corrected = join(task, tensors, [narrow(task, tensors, statistics)])
        assert float(errors[width]) < corrected < 1.1 * float(errors[width])


def test_a_layer_without_experts_has_no_curve_and_stays(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_checkpoint(**CASES["qwen3_moe"].options | CASES["qwen3_moe"].variants["mixed"])
    config = make_config(folder, form="per-layer", curvature="none", output=str(tmp_path / "profile"))
    found = profile(config)
    assert [bool(row.any()) for row in found.ffn_errors] == [True, False, True]
    for values in (found.ffn_sensitivity, found.rank_errors.sum((1, 2))):
        assert [value > 0 for value in values.tolist()] == [True, False, True]
    assert (found.stream_sensitivity > 0).all(), "a layer without experts has its neighbours' price of an error"
    assert (found.ffn_divergence > 0).all()
    layers = compress(replace(config, output=str(tmp_path / "out"), profile=str(tmp_path / "profile"))).plan["layers"]
    assert layers[1]["intermediate_size"] == WIDTH
    assert layers[1]["output_rank"] is layers[1]["query_key_rank"] is None
    assert layers[0]["intermediate_size"] != layers[2]["intermediate_size"]


# name -> what is measured; all have three layers and 4 experts
GROUPED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"curvature": "none"},  # a shared expert, and a layer without experts
    "gemma4_text-experts": {"curvature": "fisher"},  # norms behind the experts
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_experts_give_the_same_profile(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, in two groups, and one by one. Every layer advances once, whatever its passes are."""
    finish, read = ExpertAccumulator.finish, States.read
    held, advanced, found = list[int](), list[float](), {}

    def finished(self: ExpertAccumulator, workers: Workers) -> ExpertStatistics:
        statistics = finish(self, workers)
        held.append(len(statistics.grams))
        return statistics

    def counted(self: States, *arguments: Any, **named: Any) -> Iterator[Any]:
        advanced.append(1 / self.passes)
        return read(self, *arguments, **named)

    monkeypatch.setattr(ExpertAccumulator, "finish", finished)
    monkeypatch.setattr(States, "read", counted)
    folder = make_checkpoint(**variants()[name])
    for together, sizes in ((None, [4]), (3, [3, 1, 3]), (1, [1] * 7)):

        def predicted(*arguments: Any, together: int | None = together, **named: Any) -> Footprint:
            return replace(predict_footprint(*arguments, **named), experts_together=together)

        monkeypatch.setattr("oneshot.run.prediction.predict_footprint", predicted)
        output = tmp_path / str(together)
        tied = (
            len(profile(make_config(folder, form="per-layer", output=str(output), **GROUPED[name])).embedding_gram) > 0
        )
        found[together] = [path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()]
        assert held == sizes * (2 if name == "glm4_moe" else 3)
        assert sum(advanced) == pytest.approx(3 + tied)  # once more for ranks of the embedding
        held.clear()
        advanced.clear()
    assert found[1] == found[3] == found[None]
