"""Profiles: curves against direct solutions, sensitivities against the whole model, refusals of foreign profiles."""

import importlib
import itertools
import json
import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from factories import (
    MakeCheckpoint,
    MakeConfig,
    build_model,
    calibration_tokens,
    cpu_machine,
    problem_of,
    profiled_tokens,
)
from families.cases import CASES, variants
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM

from oneshot.architecture import ModelShape, TableShape
from oneshot.checkpoint import open_model
from oneshot.cli.profile import main
from oneshot.compression.statistics import GramAccumulator
from oneshot.errors import ConfigError, OutputError, PlanError, ProfileError
from oneshot.export.per_layer import PerLayerForm
from oneshot.families import LLAMA
from oneshot.linalg.interpolative import nested_errors, ordered_factor
from oneshot.pipeline import compress, compress_sizes, predict, profile
from oneshot.planning import Grid, LayerPlan, Plan, Profile, predicted_damage, reduced
from oneshot.planning.damages import damage_of_tables, removed_fluctuation, table_damages
from oneshot.profiling import LayerProfiler, load_profile
from oneshot.profiling.layer_profile import LayerProfile
from oneshot.profiling.probes import MIN_PROBE_ERROR, PROBE_SHARE, probe_size
from oneshot.text import Text

pytestmark = pytest.mark.long


@given(rows=st.integers(1, 40), size=st.integers(1, 12), outputs=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_nested_errors_are_those_of_least_squares(rows: int, size: int, outputs: int, seed: int) -> None:
    """Compare every k with NumPy's solver, for well-conditioned and for singular Grams."""
    generator = np.random.default_rng(seed)
    activations, weight = generator.standard_normal((rows, size)), generator.standard_normal((outputs, size))
    order = generator.permutation(size)
    factor = ordered_factor(torch.from_numpy(activations.T @ activations), torch.from_numpy(order))
    errors = nested_errors(factor, torch.from_numpy(weight[:, order]))
    target = activations @ weight.T
    for kept in range(size + 1):
        columns = activations[:, order[:kept]]
        missed = target - columns @ np.linalg.lstsq(columns, target, rcond=None)[0]
        expected = (missed**2).sum() / (target**2).sum()
        assert float(errors[kept]) == pytest.approx(expected, abs=1e-4)


@pytest.fixture
def profiled(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path) -> tuple[Profile, Any]:
    config = make_config(make_checkpoint(tied=True), output=str(tmp_path / "profile"))
    return profile(config), config


@pytest.mark.parametrize(("family", "form"), [("olmo2", "stock"), ("olmo2", "per-layer"), ("gpt_bigcode", "stock")])
def test_a_profile_measures_no_heads_that_no_form_can_remove(
    family: str, form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    found = profile(make_config(make_checkpoint(**CASES[family].options), form=form, output=str(tmp_path / "own")))
    assert not found.head_sensitivity.any()
    assert found.ffn_sensitivity.all()


def test_a_profile_has_every_size_of_every_sublayer(profiled: tuple[Profile, Any]) -> None:
    found, config = profiled
    shape = json.loads((Path(config.checkpoint) / "config.json").read_text())
    layers, width = shape["num_hidden_layers"], shape["intermediate_size"]
    assert found.ffn_errors.shape == (layers, width + 1)
    for errors in (found.ffn_errors, found.head_errors):
        assert torch.allclose(errors[:, 0], torch.ones(layers, dtype=torch.float64))
        assert float(errors[:, -1].abs().max()) == 0
        assert (errors.diff(dim=1) <= 1e-9).all(), "an error rose with the size"
    for values in (found.ffn_sensitivity, found.head_sensitivity, found.layer_divergence, found.block_influence):
        assert values.shape == (layers,)
        assert torch.isfinite(values).all()
        assert (values > 0).all()


@given(sizes=st.integers(1, 40), lossless=st.integers(0, 40))
def test_a_probe_errs_by_more_than_rounding(sizes: int, lossless: int) -> None:
    """Keep the fixed share of units, or fewer if that share already gives the whole output."""
    errors = torch.linspace(1, 0, sizes + 1, dtype=torch.float64) ** 2
    errors[max(1, sizes - lossless) :] = 1e-9
    kept = probe_size(errors)
    assert 1 <= kept <= max(1, round(PROBE_SHARE * sizes))
    if float(errors[1]) >= MIN_PROBE_ERROR:
        assert float(errors[kept]) >= MIN_PROBE_ERROR
        assert kept == round(PROBE_SHARE * sizes) or float(errors[kept + 1]) < MIN_PROBE_ERROR or kept == sizes - 1


def test_dead_neurons_do_not_change_the_sensitivities(make_config: MakeConfig, save_model: Any, tmp_path: Path) -> None:
    """Compare a model with its copy that has as many further neurons of zeros: sensitivities are about equal.

    Three quarters of the copy's neurons lose nothing, so its probes have to be smaller.
    """
    alive, padded = build_model(width=64), build_model(width=128)
    padded.load_state_dict(
        alive.state_dict()
        | {
            name: torch.cat((tensor, torch.zeros_like(tensor)), dim=1 if "down_proj" in name else 0)
            for name, tensor in alive.state_dict().items()
            if ".mlp." in name
        }
    )
    wanted, found = (
        profile(make_config(save_model(model), output=str(tmp_path / name)))
        for name, model in (("alive", alive), ("padded", padded))
    )
    assert float(found.ffn_errors[:, 64:].max()) < 1e-6
    ratio = found.ffn_sensitivity / wanted.ffn_sensitivity
    assert float(ratio.min()) > 1 / 3
    assert float(ratio.max()) < 3


@pytest.mark.parametrize("curvature", ["none", "fisher"])
@pytest.mark.parametrize("dead", [[1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_ranks_are_not_free_beside_ffns_that_add_nothing(
    family: str, dead: list[int], curvature: str, make_config: MakeConfig, save_model: Any, tmp_path: Path
) -> None:
    """Their probes do not say what an error in the stream costs. Dead FFNs alone go, however many more could."""
    model = build_model(**CASES[family].options | {"layers": 3})
    for number in dead:
        own = model.model.layers[number].mlp
        torch.nn.init.zeros_(own.experts.down_proj if hasattr(own, "experts") else own.down_proj.weight)
    options: dict[str, Any] = {"form": "per-layer", "curvature": curvature, "round_to": 8, "sparsity": 0.05}
    config = make_config(save_model(model), output=str(tmp_path / "out"), **options)
    report = compress(config)
    for number in dead:
        kept = report.plan["layers"][number]
        assert kept["query_key_rank"] is kept["output_rank"] is None
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    torch.testing.assert_close(found(calibration_tokens(config)).logits, model(calibration_tokens(config)).logits)


def test_fluctuations_are_those_of_the_stock_model(profiled: tuple[Profile, Any]) -> None:
    from transformers import AutoModelForCausalLM

    found, config = profiled
    text, _ = profiled_tokens(config)
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
    for layer, fluctuation in zip(model.model.layers, found.ffn_fluctuation, strict=True):
        seen: list[torch.Tensor] = []
        handle = layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        with torch.no_grad():
            model(text, use_cache=False)
        handle.remove()
        norms = layer.mlp.down_proj.weight.detach().double().square().sum(0)
        expected = seen[0].double().flatten(0, 1).var(0, correction=0) * norms
        assert torch.allclose(fluctuation, expected, rtol=1e-3)


def per_layer_grid(shape: ModelShape) -> Grid:
    model: Any = SimpleNamespace(family=LLAMA, shape=shape)
    return PerLayerForm().grid(model)


@given(seed=st.integers(0, 10**6), removed=st.integers(0, 20))
def test_least_fluctuation_is_one_threshold_for_all_layers(seed: int, removed: int) -> None:
    shape = ModelShape(3, 8, 12, 4, 2, 4, vocab_size=80, tied=True)
    scores = np.random.default_rng(seed).random((3, 12)) ** 4
    standardised = (scores - scores.mean(1, keepdims=True)) / scores.std(1, keepdims=True)
    threshold = np.sort(standardised.ravel())[removed]
    widths = (standardised >= threshold).sum(1)
    assume(widths.min() > 0)
    ffn = removed_fluctuation(torch.from_numpy(scores))
    whole = Plan((LayerPlan(12, 4, 2),) * 3, "query-head")
    target = shape.stack().stored_parameters() - removed * 3 * shape.hidden_size
    damages = {"ffn": ffn, "heads": torch.zeros(3, 3), "layers": torch.ones(3)}
    plan = reduced(problem_of(per_layer_grid(shape), target, damages, round_to=1), whole)
    assert [layer.intermediate_size for layer in plan.layers] == widths.tolist()


def test_the_recipe_flap_gives_every_layer_its_own_width(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(tied=True)
    settings: dict[str, Any] = {"recipe": "flap", "form": "per-layer", "sparsity": 0.2, "round_to": 1}
    report = compress(make_config(folder, **settings))
    assert report.method["allocation"] == "flap"
    assert len({layer["intermediate_size"] for layer in report.plan["layers"]}) > 1
    assert report.sparsity["reached"] == pytest.approx(0.2, abs=0.01)
    with pytest.raises(ConfigError, match="--set allocation=flap is for FFN neurons alone"):
        compress(make_config(folder, **settings, heads="id"))


@pytest.mark.parametrize("bias", [False, True])
def test_errors_of_kv_groups_are_those_of_least_squares(
    bias: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Choose groups by SciPy's pivoted QR, and solve every size with NumPy, on what the stock model's o_proj reads."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(hidden=48, groups=4, attention_bias=bias)
    config = make_config(folder, output=str(tmp_path / "profile"), head_unit="kv-group")
    found, (text, _) = profile(config), profiled_tokens(config)
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
    assert found.head_errors.shape == (len(model.model.layers), 4 + 1)
    for layer, errors in zip(model.model.layers, found.head_errors, strict=True):
        seen: list[torch.Tensor] = []
        linear = layer.self_attn.o_proj
        handle = linear.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        with torch.no_grad():
            model(text, use_cache=False)
        handle.remove()
        rows, weight = seen[0].double().flatten(0, 1).numpy(), linear.weight.detach().double().numpy()
        target = rows @ weight.T
        long = (rows * np.linalg.norm(weight, axis=0)).reshape(len(rows), 4, -1).swapaxes(1, 2).reshape(-1, 4)
        order = scipy.linalg.qr(long, mode="r", pivoting=True)[1]
        if bias:
            target += linear.bias.detach().double().numpy()
        for kept in range(1, 4):
            chosen = rows.reshape(len(rows), 4, -1)[:, order[:kept]].reshape(len(rows), -1)
            chosen = np.column_stack((chosen, *[np.ones(len(rows))] * bias))
            missed = target - chosen @ np.linalg.lstsq(chosen, target)[0]
            assert float(errors[kept]) == pytest.approx((missed**2).sum() / (target**2).sum(), rel=2e-3)


def test_leaving_a_layer_out_diverges_as_the_stock_model_does(profiled: tuple[Profile, Any]) -> None:
    """Compare `layer_divergence` with transformers' model without the layer, on the probe sequences."""
    from transformers import AutoModelForCausalLM

    found, config = profiled
    _, probes = profiled_tokens(config)
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
    with torch.no_grad():
        dense = model(probes, use_cache=False).logits.double().log_softmax(-1)
        for layer, divergence in enumerate(found.layer_divergence.tolist()):
            model = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
            del model.model.layers[layer]
            reduced = model(probes, use_cache=False).logits.double().log_softmax(-1)
            expected = functional.kl_div(reduced, dense, log_target=True, reduction="sum") / probes.numel()
            assert divergence == pytest.approx(float(expected), rel=1e-3)


def test_a_profile_is_read_back_unchanged(profiled: tuple[Profile, Any]) -> None:
    found, config = profiled
    read = load_profile(Path(config.output))
    assert read.origin == found.origin
    assert torch.equal(read.ffn_errors, found.ffn_errors)
    assert torch.equal(read.head_sensitivity, found.head_sensitivity)


def test_planning_from_a_profile_equals_planning_within_the_run(
    profiled: tuple[Profile, Any], make_config: MakeConfig, tmp_path: Path
) -> None:
    _, of_profile = profiled
    checkpoint = Path(of_profile.checkpoint)
    options: dict[str, Any] = {"form": "per-layer", "heads": "id", "round_to": 4, "sparsity": 0.1}
    within = compress(make_config(checkpoint, **options, output=str(tmp_path / "within")))
    given_profile = make_config(checkpoint, **options, profile=of_profile.output, output=str(tmp_path / "given"))
    planned = compress(given_profile)
    assert planned.plan == within.plan
    assert len({layer["intermediate_size"] for layer in planned.plan["layers"]}) > 1, "all layers are equal"
    reached = planned.stored_parameters["compressed"] / planned.stored_parameters["dense"]
    assert 0.88 < reached <= 0.9
    assert planned.predicted_divergence is not None
    assert planned.predicted_divergence["plan"] == planned.predicted_divergence["per-layer"]
    assert 0 < planned.predicted_divergence["plan"] <= planned.predicted_divergence["stock"]
    folders = (tmp_path / "within", tmp_path / "given")
    first, second = (sorted(folder.glob("*.safetensors")) for folder in folders)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_profile_that_nothing_is_planned_from_is_told(
    profiled: tuple[Profile, Any], make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    _, of_profile = profiled
    compress(make_config(Path(of_profile.checkpoint), sparsity=0.1, profile=of_profile.output))
    assert f"The profile {of_profile.output} is not used" in caplog.text


@pytest.mark.parametrize("heads", ["none", "id"])
def test_a_run_profiles_heads_only_if_it_removes_some(
    heads: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record the sizes of the profile's statistics and the profile itself."""
    sizes: list[int] = []
    profiles: list[Profile] = []
    finish = LayerProfiler.finish

    def accumulator(size: int, **options: Any) -> GramAccumulator:
        sizes.append(size)
        return GramAccumulator(size, **options)

    def finished(self: LayerProfiler, *arguments: Any) -> Profile:
        profiles.append(finish(self, *arguments))
        return profiles[-1]

    monkeypatch.setattr("oneshot.profiling.layer_statistics.GramAccumulator", accumulator)
    monkeypatch.setattr(LayerProfiler, "finish", finished)
    compress(make_config(make_checkpoint(width=80), form="per-layer", heads=heads, sparsity=0.1))
    (found,) = profiles
    layers, head_columns, width = 2, 32, 80
    assert found.head_errors.shape == (layers, 2 + 1)
    assert float(found.ffn_sensitivity.min()) > 0
    if heads == "none":
        assert sizes == [width] * layers
        assert not found.head_errors.any()
        assert not found.head_sensitivity.any()
    else:
        assert sorted(sizes) == [head_columns] * layers + [width] * layers
        assert float(found.head_errors[:, 0].min()) == 1
        assert float(found.head_sensitivity.min()) > 0


def test_profiles_of_another_model_or_text_are_refused(
    profiled: tuple[Profile, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig, other_text_file: Path
) -> None:
    _, config = profiled
    options: dict[str, Any] = {"form": "per-layer", "profile": config.output}
    for run in (predict, compress):
        with pytest.raises(ProfileError, match="another model"):
            run(make_config(make_checkpoint(tied=False), **options))
    with pytest.raises(ProfileError, match="another calibration text"):
        compress(make_config(Path(config.checkpoint), **options, calibration=str(other_text_file)))
    with pytest.raises(ProfileError, match="by head_unit=query-head, but this run has head_unit=kv-group"):
        compress(make_config(Path(config.checkpoint), **options, heads="id", head_unit="kv-group"))
    for run in (predict, compress):
        with pytest.raises(ProfileError, match=r"made with --set damping=0\.03, but this run has damping=0\.3;"):
            run(make_config(Path(config.checkpoint), **options, damping=0.3))
    (Path(config.output) / "profile.safetensors").write_bytes(b"cut")
    with pytest.raises(ProfileError, match="not a readable profile"):
        compress(make_config(Path(config.checkpoint), **options))


def test_a_plan_from_a_profile_does_not_write_the_text_again(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the one that the model wrote for the profile, unless the run has another seed or no use for the profile."""
    checkpoint = make_checkpoint(layers=1)
    text: dict[str, Any] = {"calibration": f"{text_file}+self", "num_sequences": 4, "sequence_length": 24}
    of_profile = make_config(checkpoint, **text, output=str(tmp_path / "profile"))
    found = profile(of_profile)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("text was written")

    monkeypatch.setattr("oneshot.run.calibration.write_text", refuse)
    options: dict[str, Any] = text | {"form": "per-layer", "profile": of_profile.output, "round_to": 1, "sparsity": 0.1}
    report = compress(make_config(checkpoint, **options, output=str(tmp_path / "planned")))
    assert report.calibration is not None
    assert report.calibration["token_hash"] == found.origin.token_hash
    for changes in ({"seed": 1}, {"form": "stock"}, {"num_sequences": 6}):
        with pytest.raises(AssertionError, match="text was written"):
            compress(make_config(checkpoint, **options | changes, output=str(tmp_path / "other")))


def test_a_plan_from_a_profile_does_not_measure_the_curvature_again(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is the profile's, to the last bit, unless the disk had no room for it; a damaged one is refused."""
    checkpoint = make_checkpoint(layers=1)
    options: dict[str, Any] = {"form": "per-layer", "round_to": 1, "sparsity": 0.1}
    whole, without = str(tmp_path / "whole"), str(tmp_path / "without")
    with monkeypatch.context() as full:
        usage = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1000), move=shutil.move)
        full.setattr("oneshot.profiling.files.shutil", usage)
        profile(make_config(checkpoint, **options | {"sparsity": 0.0}, output=whole))
        assert not caplog.records, "files move within a disk without room for a copy"
        full.setattr("oneshot.profiling.files._disk_of", str)
        profile(make_config(checkpoint, **options | {"sparsity": 0.0}, output=without))
    assert re.search(rf"{without} is written without the output curvature, [1-9]\d* KB, .* has 1 KB free", caplog.text)
    modes = {(tmp_path / "whole" / name).stat().st_mode & 0o777 for name in (".", "curvature")}
    assert modes == {0o755}, "others may read a profile"
    stored = []
    for name, further in (("within", {}), ("again", {"profile": without})):
        compress(make_config(checkpoint, **options, **further, output=str(tmp_path / name)))
        stored.append((tmp_path / name / "model.safetensors").read_bytes())
    monkeypatch.setattr("oneshot.run.run.measure_curvature", None)  # cannot be called
    planned = make_config(checkpoint, **options, profile=whole, output=str(tmp_path / "planned"))
    assert predict(replace(planned, output=str(tmp_path / "dry"))).scratch_bytes == 0
    compress(planned)
    assert [*stored, (tmp_path / "planned" / "model.safetensors").read_bytes()] == [stored[0]] * 3
    damaged = tmp_path / "whole" / "curvature" / "layer-0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(ProfileError, match=r"curvature/layer-0\.safetensors was damaged"):
        compress(replace(planned, output=str(tmp_path / "refused")))


def test_an_existing_profile_is_not_replaced(profiled: tuple[Profile, Any]) -> None:
    _, config = profiled
    with pytest.raises(OutputError, match="exists already"):
        profile(config)


def test_several_targets_share_one_run(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare each with a run for it alone; a target out of reach is refused before the first one."""
    checkpoint = make_checkpoint()
    options: dict[str, Any] = {"form": "per-layer", "round_to": 4}
    together = make_config(checkpoint, **options, output=str(tmp_path / "all"))
    made: list[str] = []

    def count(place: str, name: str) -> None:
        module = importlib.import_module(f"oneshot.{place}")
        real = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    shared = ("run.calibration", "load_text"), ("run.run", "measure_curvature"), ("run.run", "make_profile")
    for place, name in (*shared, ("pipeline", "compress_layers")):
        count(place, name)
    reports = compress_sizes(together, [0.1, 0.2])
    assert Counter(made) == {name: 1 for _, name in shared} | {"compress_layers": 2}, "a size more costs its layers"
    for sparsity, report in zip((0.1, 0.2), reports, strict=True):
        alone = compress(make_config(checkpoint, **options, sparsity=sparsity, output=str(tmp_path / f"{sparsity}")))
        assert report.plan == alone.plan
        folder = tmp_path / "all" / f"sparsity-{sparsity:.2f}"
        for path in sorted((tmp_path / f"{sparsity}").glob("*.safetensors")):
            assert path.read_bytes() == (folder / path.name).read_bytes()
    with pytest.raises(PlanError):
        compress_sizes(make_config(checkpoint, output=str(tmp_path / "none")), [0.1, 0.99])
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="equal to two decimals"):
        compress_sizes(together, [0.1, 0.101])


def test_the_command_line(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "profile"
    arguments = [str(make_checkpoint()), f"--output={target}", f"--calibration={text_file}", "--num-sequences=4"]
    assert main([*arguments, "--sequence-length=32", "--device=cpu"]) == 0
    assert "sensitivity" in capsys.readouterr().out
    assert math.isfinite(float(load_profile(target).ffn_sensitivity.sum()))
    assert main([*arguments, "--sequence-length=32", "--device=cpu"]) == 1
    assert "exists already" in capsys.readouterr().err


@given(seed=st.integers(0, 10**6), share=st.floats(0.05, 0.6), unit=st.sampled_from(("query-head", "kv-group")))
def test_per_layer_sizes_are_the_best_of_all(seed: int, share: float, unit: Any) -> None:
    """Compare with every combination of widths, heads and ranks of two ranges, on curves that fall with the size."""
    shape = ModelShape(2, 8, 12, 4, 2, 4, vocab_size=80, tied=True)
    generator = np.random.default_rng(seed)

    def curves(size: int) -> torch.Tensor:
        return torch.from_numpy(np.sort(generator.random((2, size)), axis=1)[:, ::-1].copy())

    embedding = torch.full((8, 9), torch.inf, dtype=torch.float64)
    embedding[-2:] = curves(9)
    embedding[:, -1] = 0
    damages = {"ffn": curves(13), "heads": curves(3), "layers": torch.ones(2), "embedding": embedding.unsqueeze(0)}
    grid, whole = per_layer_grid(shape), Plan((LayerPlan(12, 4, 2),) * 2, unit)
    dense = shape.stack().stored_parameters()
    target = dense - share * shape.stack().all_layer_parameters()
    heads = [(2, 2), (4, 2)] if unit == "query-head" else [(2, 1), (4, 2)]
    layers = [LayerPlan(width, *each) for width in (4, 8, 12) for each in heads]
    ranks = [1, 2, 3, 4, 5, 8]  # fewer parameters than 10 rows of 8
    tables = [(8,) * 6 + pair for pair in itertools.product(ranks, ranks)]
    embeddings = [tuple(TableShape(10, rank) for rank in each) for each in tables]
    of_layers = [replace(whole, layers=pair) for pair in itertools.product(layers, layers)]
    of_tables = [replace(whole, embedding=each) for each in embeddings[:-1]] + [whole]  # both add up
    stored, lost = (
        np.add.outer(*([count(plan) for plan in plans] for plans in (of_layers, of_tables))) - count(whole)
        for count in (lambda plan: grid.stack(plan).stored_parameters(), lambda plan: predicted_damage(plan, damages))
    )
    problem = problem_of(grid, target, damages, round_to=4, heads="id", embedding="low-rank")
    if not (stored <= target).any():
        with pytest.raises(PlanError, match="at best"):
            reduced(problem, whole)
        return
    found = reduced(problem, whole)
    assert grid.stack(found).stored_parameters() <= target
    assert predicted_damage(found, damages) == pytest.approx(lost[stored <= target].min(), abs=1e-4)


def test_an_embedding_costs_what_its_probes_measured() -> None:
    """Between probes the slope is the price, and a later slope is never smaller."""
    generator = torch.Generator().manual_seed(0)
    errors = torch.rand(8, 9, generator=generator, dtype=torch.float64).sort(dim=1, descending=True).values
    errors[:, -1] = 0
    probes = torch.tensor([[0.1, 0.01], [0.3, 0.09], [0.8, 0.24]], dtype=torch.float64)  # slopes 0.1, 0.4, 0.3
    damages = {"embedding": table_damages(probes, errors)}
    for _ in range(20):
        ranks = torch.randint(9, (8,), generator=generator).tolist()
        lost = float(errors[range(8), ranks].sum())
        wanted = max(0.1 * lost, 0.01 + 0.4 * (lost - 0.1))
        tables = [TableShape(10, rank) for rank in ranks]
        assert damage_of_tables({"embedding": tables}, damages) == pytest.approx(wanted)
    assert damage_of_tables({"embedding": [TableShape(10, 8)] * 8}, damages) == 0


def test_a_plan_lies_where_the_price_of_an_embedding_changes() -> None:
    """Two ranges may shrink. Compare with every combination, and with the best ones at either price alone."""
    shape = ModelShape(2, 64, 64, 4, 4, 4, vocab_size=512, tied=True)
    left = torch.linspace(1, 0, 65, dtype=torch.float64)
    flat = torch.full((8, 65), torch.inf, dtype=torch.float64)
    flat[-2:], flat[:, -1] = left**2, 0
    lines = torch.stack((flat / 4, 3 * flat - 0.8 / 8))
    damages = {
        "ffn": torch.stack((left, left)) ** 2,
        "heads": torch.zeros(2, 5),
        "layers": torch.ones(2),
        "embedding": lines,
    }
    grid, whole = per_layer_grid(shape), Plan((LayerPlan(64, 4, 4),) * 2, "kv-group")
    whole_size = grid.stack(whole).stored_parameters()
    target = whole_size - 12_000
    widths, ranks = range(4, 65, 4), [*range(4, 59, 4), 64]
    of_layers = [
        replace(whole, layers=tuple(LayerPlan(width, 4, 4) for width in pair))
        for pair in itertools.product(widths, widths)
    ]
    of_tables = [
        replace(whole, embedding=tuple(TableShape(64, rank) for rank in (*(64,) * 6, *pair)))
        for pair in [*itertools.product(ranks, ranks)][:-1]
    ] + [whole]

    def sums(prices: torch.Tensor) -> np.ndarray:
        counted = damages | {"embedding": prices}
        return np.add.outer(*([predicted_damage(plan, counted) for plan in plans] for plans in (of_layers, of_tables)))

    stored = np.add.outer(*([grid.stack(p).stored_parameters() for p in plans] for plans in (of_layers, of_tables)))
    fits, lost = stored - whole_size <= target, sums(lines)
    at_one_price = [lost[fits][sums(line.unsqueeze(0))[fits].argmin()] for line in lines]
    problem = problem_of(grid, target, damages, round_to=4, heads="none", embedding="low-rank")
    found = predicted_damage(reduced(problem, whole), damages)
    assert found < 0.9 * min(at_one_price)
    assert found == pytest.approx(lost[fits].min(), rel=0.02)


def test_a_family_with_fixed_heads(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """Check that OPT, whose heads all stay, is planned and predicted by its FFN alone."""
    report = compress(make_config(make_checkpoint(family="opt", groups=4), form="per-layer", sparsity=0.1, round_to=1))
    assert report.predicted_divergence is not None
    assert report.predicted_divergence["plan"] > 0
    assert {layer["num_attention_heads"] for layer in report.plan["layers"]} == {4}


@torch.inference_mode()
def test_probes_have_the_states_of_the_stock_model_with_one_ffn_reduced(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each probe has the keys that its own layers lend to later ones; wide FFNs keep an even number of neurons."""
    options = variants()["gemma4_text-tokens"]
    model, reduced = open_model(str(make_checkpoint(**options)), tmp_path), dict[int, Any]()
    add = LayerProfile._add_ffn

    def keep(self: Any, tensors: Any, *further: Any) -> None:
        reduced[self._layer] = tensors
        add(self, tensors, *further)

    monkeypatch.setattr(LayerProfile, "_add_ffn", keep)
    ids = torch.randint(4, 400, (6, 24), generator=torch.Generator().manual_seed(0))
    machine = cpu_machine(tmp_path, batch_size=2)
    profiler = LayerProfiler(
        model, machine, Text(ids, "text"), head_unit="kv-group", damping=1e-4, probed=["ffn", "rank"]
    )
    for number in range(5):
        profiler.profile_layer(number, model.read_layer(number))
    probes = profiler._probes._reduced
    assert [probe.layer for probe in probes] == list(range(5))
    for index, probe in enumerate(probes):
        stock, hidden = build_model(**options), list[torch.Tensor]()
        stock.model.norm.register_forward_pre_hook(lambda _, inputs, hidden=hidden: hidden.append(inputs[0].clone()))
        stock(profiler.batch.token_ids)
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = stock.model.layers[probe.layer].mlp.get_submodule(name)
            linear.weight = torch.nn.Parameter(reduced[probe.layer][f"mlp.{name}.weight"], requires_grad=False)
        stock(profiler.batch.token_ids)
        dense, expected = hidden
        torch.testing.assert_close(profiler._probes.states(index), expected, rtol=1e-4, atol=1e-3)
        assert not torch.allclose(dense, expected, atol=1e-1)
        assert probe.energy > 0
    torch.testing.assert_close(profiler._probes.dense, dense, rtol=1e-4, atol=1e-3)
    assert [len(curves["ffn_errors"]) for curves in profiler._curves] == [129] * 5
    assert torch.equal(profiler._curves[0]["ffn_errors"][:-1:2], profiler._curves[0]["ffn_errors"][1::2])
