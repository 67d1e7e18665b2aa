"""Experts whose statistics do not fit together: groups of them, with a pass for each, give the same bytes."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES

from oneshot import Config, Footprint, MachineOptions
from oneshot.compression import LayerCompressor
from oneshot.errors import MemoryLimitError
from oneshot.footprint import predict_footprint
from oneshot.footprint.bounds import Bounds
from oneshot.machine import Workers
from oneshot.pipeline import compress, predict
from oneshot.report.records import Report
from oneshot.report.terminal import print_footprint, print_report
from oneshot.run import footprint_of, open_run
from oneshot.schedule import profile_schedule
from oneshot.stream import States

GIB = 2**30
# name -> (model, options); all have 4 experts
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "neurons": ("qwen3_moe", {}),
    "towards the sublayer": ("qwen3_moe", {"residual_target": "sublayer"}),
    "one stream": ("qwen3_moe", {"correction": "same-layer"}),
    "drawn neurons": ("qwen3_moe", {"ffn": "random"}),
    "fewer experts": ("qwen3_moe", {"experts": "effects", "num_experts": 3, "sparsity": 0.35}),
    "a shared expert": ("glm4_moe", {}),
    "biases": ("gpt_oss", {}),
}
# more in the Grams of experts than in anything else
LARGE = {**CASES["qwen3_moe"].options, "hidden": 64, "num_experts": 8, "moe_intermediate_size": 1024, "layers": 1}
GRAMS = 8 * 8 * 1024**2  # bytes of their sums


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Give the function that lets runs hold the statistics of so many experts together."""

    def held(together: int | None) -> None:
        def predicted(*arguments: Any, **options: Any) -> Footprint:
            return replace(predict_footprint(*arguments, **options), experts_together=together)

        monkeypatch.setattr("oneshot.run.prediction.predict_footprint", predicted)

    return held


def weights(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors"))]


def told(report: Report) -> list[Any]:
    """Return what a report says of the layers, without times and memory."""
    return [(asdict(layer)["sublayers"], layer.warnings, layer.gram_notes) for layer in report.layers]


@pytest.mark.parametrize("name", RUNS)
def test_groups_of_experts_give_the_same_bytes(
    name: str,
    hold: Callable[[int | None], None],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once, in two groups (of two and one, where one expert of four goes), and one by one."""
    family, options = RUNS[name]
    folder, passes, expected = make_checkpoint(**CASES[family].options), list[float](), list[float]()
    read, count = States.read, LayerCompressor._passes

    def counted(self: States, *arguments: Any, **named: Any) -> Iterator[Any]:
        for batch in read(self, *arguments, **named):
            passes[-1] += batch[0].shape[0] * batch[0].shape[1] / self.num_tokens
            yield batch

    def announced(*arguments: Any) -> float:
        passes.append(0.0)
        expected.append(count(*arguments))
        return expected[-1]

    monkeypatch.setattr(States, "read", counted)
    monkeypatch.setattr(LayerCompressor, "_passes", staticmethod(announced))
    found = {}
    for together in (None, 2, 1):
        hold(together)
        config = make_config(folder, output=str(tmp_path / str(together)), **{"num_sequences": 12} | options)
        report = compress(config)
        found[together] = weights(config.output), told(report)
    assert found[1] == found[2] == found[None]
    assert passes == pytest.approx(expected)
    last_layers = expected[len(expected) // 3 - 1 :: len(expected) // 3]
    assert last_layers[1] - last_layers[0] == 2, "two groups, and the states come to them in a pass of its own"


def test_a_run_that_was_stopped_goes_on_with_other_groups(
    hold: Callable[[int | None], None],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_checkpoint(**CASES["qwen3_moe"].options)
    config = make_config(folder, num_sequences=12)
    compress(replace(config, output=str(tmp_path / "whole")))
    compress_layer = LayerCompressor.compress_layer

    def interrupted(self: LayerCompressor, layer: int, tensors: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return compress_layer(self, layer, tensors)

    hold(1)
    monkeypatch.setattr(LayerCompressor, "compress_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress(config)
    monkeypatch.setattr(LayerCompressor, "compress_layer", compress_layer)
    hold(3)
    compress(replace(config, resume=True))
    assert weights(config.output) == weights(str(tmp_path / "whole"))


# The limits of the memory decide


@pytest.fixture
def large(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int | None], Config]:
    """Give the function from a limit of the host to a config; the held memory is always the same."""

    def bounds(options: MachineOptions, _: torch.device) -> Bounds:
        limit = options.max_memory_bytes
        return Bounds(GIB // 4, 0, limit or 2**40, limit is not None, 0, 0, 0, False, 2**40)

    monkeypatch.setattr("oneshot.run.prediction.current_bounds", bounds)
    folder = make_checkpoint(**LARGE)
    return lambda limit: make_config(folder, num_sequences=4, batch_size=4, max_memory_bytes=limit)


def test_as_few_groups_as_fit_are_planned(
    large: Callable[[int | None], Config], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole, least = predict(large(None)), predict(large(least_of(lambda limit: predict(large(limit)))))
    assert (whole.experts_together, whole.expert_groups) == (None, 1)
    assert least.host_bytes < whole.host_bytes
    config = large((least.host_bytes + whole.host_bytes) // 2)
    predicted, tighter = predict(config), predict(large(least.host_bytes))
    assert predicted.host_bytes <= (config.machine.max_memory_bytes or 0)
    assert 1 < predicted.expert_groups < tighter.expert_groups == least.expert_groups
    report = compress(replace(config, output=str(tmp_path / "grouped")))
    assert report.footprint is not None
    assert report.footprint.expert_groups == predicted.expert_groups
    assert f"in {predicted.expert_groups} groups of at most {predicted.experts_together}" in str(predicted)
    for show in (lambda: print_footprint(predicted), lambda: print_report(report)):
        show()
        assert f"{predicted.expert_groups} groups" in " ".join(capsys.readouterr().out.split())


def test_a_profile_alone_is_also_planned_in_groups(large: Callable[[int | None], Config]) -> None:
    """And it holds no Grams of neurons that it does not measure."""

    def of_profile(limit: int | None, kind: str = "ffn") -> Footprint:
        config = replace(large(limit), form="per-layer")
        with open_run(config) as run:
            schedule = profile_schedule(run.grid, run.method)
            schedule = replace(schedule, profiled_kinds=(kind,), weighs_output=False, measures_curvature=False)
            return footprint_of(run, config, schedule, None)

    whole, least = of_profile(None), least_of(of_profile)
    assert whole.host_stage == "the profile's error curves"
    assert whole.expert_groups == 1
    middle = (least + whole.host_bytes) // 2
    found = of_profile(middle)
    assert least < found.host_bytes <= middle
    assert 1 < found.expert_groups < 8
    assert of_profile(None, "experts").host_bytes < whole.host_bytes - GRAMS


def least_of(footprint: Callable[[int], Footprint]) -> int:
    """Return the least limit, which the refusal of a smaller one names."""
    with pytest.raises(MemoryLimitError) as caught:
        footprint(GIB // 4)
    assert "\n" not in str(caught.value)
    return int(str(caught.value).rpartition("--max-memory ")[2].removesuffix("MiB.")) * 2**20


def test_processes_take_as_many_experts_together_as_the_one_with_the_least_memory(
    large: Callable[[int | None], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They sum the statistics of the same experts; here the other process has room for three."""
    monkeypatch.setattr(Workers, "gather", lambda _, items: (*items, 3))
    found = predict(large(None))
    assert (found.experts_together, found.expert_groups) == (3, 3)
