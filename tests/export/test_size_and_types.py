"""`--max-file-size` alone: how many parameters go and in which types the others are stored is one choice."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES

from oneshot import job
from oneshot.config import Config
from oneshot.errors import ConfigError, PlanError
from oneshot.export.original_types import BESIDE_OF_LAYER, price_original
from oneshot.export.quantisers import bytes_of, types_of
from oneshot.export.tensor_types import beside_bytes, chosen_types, damage_of
from oneshot.job import Job, plan_jobs
from oneshot.machine import Machine
from oneshot.pipeline import compress, predict
from oneshot.planning import beside_rounding, dense_plan, make_plan, with_share
from oneshot.planning.damages import predicted_damage
from oneshot.planning.predicted import LEAST_SHARE, LOST_BESIDE_ROUNDING, MOST
from oneshot.run import open_run
from oneshot.settings import read_recipe, recipe_text

pytest.importorskip("libgguf", reason="the extra `quantise`")
MODEL: dict[str, Any] = {"hidden": 64, "width": 256, "layers": 3}
FREE: dict[str, Any] = {"form": "gguf", "sparsity": None, "round_to": 32}
WEIGHTS = "model.gguf"


def size_of(config: Config) -> int:
    return (Path(config.output) / WEIGHTS).stat().st_size


@pytest.fixture(scope="module")
def smallest(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> int:
    """About the bytes of the original in its smallest types."""
    from factories import small_config

    output = tmp_path_factory.mktemp("whole") / "out"
    config = small_config(make_checkpoint(**MODEL), text_file, output=output, form="gguf", sparsity=0.0, bits=4.6)
    compress(config)
    return size_of(config)


def test_types_of_a_plan_are_priced_as_a_file_stores_them(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The whole model as its own choice of types, and a smaller one down to the least bytes that its file can have."""
    folder = make_checkpoint(**MODEL)
    whole = make_config(folder, form="gguf", sparsity=0.0, output=str(tmp_path / "whole"))
    smaller = make_config(folder, **FREE | {"sparsity": 0.3}, output=str(tmp_path / "smaller"))
    compress(whole)
    compress(smaller)
    with open_run(smaller, [Path(smaller.output)]) as run:
        text, machine = run.text, run.machine
        assert isinstance(machine, Machine)
        types = price_original(Path(whole.output), text, machine, 0, advance=lambda tokens: None, rounds=lambda: None)
        grid, dense = run.grid, dense_plan(run.model.shape, run.method)
        [done] = plan_jobs([replace(smaller, output=str(tmp_path / "again"))], run)
        plan = make_plan(grid, run.method, smaller.target)
        assert grid.stack(done.plan) == grid.stack(plan)
    around = types.beside_bytes + BESIDE_OF_LAYER * 3
    budget = sum(float(one.bytes.min()) for one in types.priced) * 1.3
    alone = damage_of(types.priced, chosen_types(types.priced, budget))
    assert types.loss_of(dense, grid.dense, int(around + budget)) == pytest.approx(alone, rel=0.02)
    stack = grid.stack(plan)
    shapes = [shape for shape in shapes_of(Path(smaller.output) / WEIGHTS) if len(shape) == 2]
    least = sum(min(bytes_of(shape, kind) for kind in types_of(shape[1])) for shape in shapes)
    assert math.isfinite(types.loss_of(plan, stack, around + least))
    assert types.loss_of(plan, stack, around + least - 1) == math.inf
    names = {str(number): name for number, name in enumerate(matrices(Path(smaller.output) / WEIGHTS))}
    assert beside_bytes(Path(smaller.output) / WEIGHTS, names) <= around


def matrices(path: Path) -> list[str]:
    import gguf

    return [tensor.name for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) == 2]


def shapes_of(path: Path) -> list[tuple[int, ...]]:
    import gguf

    return [tuple(int(size) for size in reversed(tensor.shape)) for tensor in gguf.GGUFReader(path).tensors]


@pytest.mark.parametrize(("share", "removes"), [(1.5, False), (0.8, True)], ids=("room for all", "below the types"))
def test_the_choice_is_the_best_of_all_shares(
    share: float,
    removes: bool,
    smallest: int,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def remembered(*arguments: Any) -> Any:
        found = beside_rounding(*arguments)
        asked.append((arguments, found))
        return found

    monkeypatch.setattr(job.sizes, "beside_rounding", remembered)
    config = make_config(make_checkpoint(**MODEL), gguf_bytes=round(share * smallest), **FREE)
    predicted, dense = predict(config), Path(config.checkpoint) / "model.safetensors"
    assert predicted.result_bytes == config.target.gguf_bytes
    assert predicted.scratch_bytes >= 1.9 * dense.stat().st_size  # a file of the original, made from parts
    report = compress(config)
    assert size_of(config) <= share * smallest
    [((grid, method, target, damages, sensitivity, rounding), found)] = asked
    totals = []
    for steps in range(MOST + 1):
        try:
            plan = make_plan(grid, method, with_share(target, steps * LEAST_SHARE), damages)
        except PlanError:
            break
        totals.append(LOST_BESIDE_ROUNDING * predicted_damage(plan, sensitivity) + rounding(plan))
    chosen = found.removal + found.rounding
    assert chosen <= min(totals[0], 1.1 * min(totals))
    assert (report.stored_parameters["compressed"] < report.stored_parameters["dense"]) == removes
    assert math.isinf(found.rounding_alone) == removes
    if not removes:  # and then the file is the one of --sparsity 0
        whole = replace(config, target=replace(config.target, sparsity=0.0), output=f"{config.output}-whole")
        compress(whole)
        assert (Path(whole.output) / WEIGHTS).read_bytes() == (Path(config.output) / WEIGHTS).read_bytes()


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_equal_layers_have_the_choice(
    family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """All layers lose equally much where llama.cpp has no layers of different sizes for a family."""
    options = CASES[family].options | {"hidden": 64, "width": 256, "head_dim": 32, "layers": 2, "layer_types": None}
    if family == "gemma3_text":
        options["query_pre_attn_scalar"] = 32
    folder = make_checkpoint(**options)
    config = make_config(folder, form="gguf", sparsity=0.0, bits=4.6, output=str(tmp_path / "whole"))
    whole = compress(config)
    asked = make_config(folder, gguf_bytes=round(0.9 * size_of(config)), output=str(tmp_path / "small"), **FREE)
    report = compress(asked)
    assert size_of(asked) <= 0.9 * size_of(config)
    assert report.stored_parameters["compressed"] < whole.stored_parameters["compressed"]
    assert len({layer["intermediate_size"] for layer in report.plan["layers"]}) == 1


def test_an_interrupted_run_keeps_its_choice(
    smallest: int, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(make_checkpoint(**MODEL), gguf_bytes=round(0.8 * smallest), **FREE)
    compress(replace(config, output=f"{config.output}-at-once"))

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("oneshot.pipeline.write_outside", interrupted_after_original(interrupted))
    with pytest.raises(KeyboardInterrupt):
        compress(config)
    monkeypatch.undo()
    monkeypatch.setattr("oneshot.pipeline.price_original", interrupted)  # it is not measured again
    compress(replace(config, resume=True))
    first, second = (Path(output) / WEIGHTS for output in (f"{config.output}-at-once", config.output))
    assert first.read_bytes() == second.read_bytes()


def interrupted_after_original(interrupt: Any) -> Any:
    """Return a stand-in of `write_outside` that lets the file of the original pass."""
    write = job.write_outside

    def once(of_job: Job, journal: Any) -> None:
        (write if of_job.output.name == "original" else interrupt)(of_job, journal)

    return once


def test_what_cannot_be_chosen_is_refused(
    smallest: int, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**MODEL)
    with pytest.raises(PlanError, match=r"smallest types of this model's tensors take 0\.0\d MB"):
        predict(make_config(folder, gguf_bytes=smallest // 10, **FREE))
    with pytest.raises(ConfigError, match=r"add --sparsity 0, or how much"):
        predict(make_config(folder, gguf_bytes=smallest, **FREE | {"allocation": "uniform", "ranks": "none"}))
    with pytest.raises(ConfigError, match="--max-file-size is a budget of its own; give --sparsity beside"):
        make_config(folder, gguf_bytes=smallest, budget="flops", **FREE)
    with pytest.raises(ConfigError, match="Give exactly one target"):
        make_config(folder, bits=4.5, **FREE)


def test_a_recipe_asks_for_the_same(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(Path("model"), gguf_bytes=9_000_000, **FREE)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(config))
    again = Config.from_dict({"output": config.output} | read_recipe(path, {}))
    assert again.target == config.target
    assert again.target.finds_share
