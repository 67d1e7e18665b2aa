"""Settings that cannot act beside the others are refused, unless the recipe states them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from advice import mentions
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES

from oneshot.cli.compress import main
from oneshot.config import Config
from oneshot.errors import ConfigError
from oneshot.pipeline import compress, predict, profile

SLICED: dict[str, Any] = {"recipe": "tcsp"}
MIXTURE, DENSE = "mixtral", ""
# a setting; what makes it act; and a model of which this is so
IDLE: list[tuple[str, Any, dict[str, Any], str]] = [
    ("sketch_size", 96, {"sketch": "count"}, DENSE),
    ("head_unit", "kv-group", {"heads": "id"}, DENSE),
    ("layer_allocation", "stat", {"form": "per-layer"}, DENSE),
    ("pivot_group_size", 16, {"pivoting": "grouped"}, DENSE),
    ("pivot_group_size", 16, {"pivoting": "tournament"}, DENSE),
    ("group_size", 2, SLICED | {"form": "per-layer"}, DENSE),
    ("token_weighting", "raw", SLICED, DENSE),
    ("shared_weight", 0.5, {"recipe": "group-pca"}, DENSE),
    ("value_features", "values", {"form": "per-layer", "value_size": 4}, DENSE),
    ("value_features", "values", {"form": "per-layer", "inner_rate": 0.25, "sparsity": None}, DENSE),
    ("value_weights", "none", {"form": "per-layer", "inner_sizes": "sensitivity"}, DENSE),
    ("expert_damping", 0.5, {}, MIXTURE),
    ("expert_residual_weight", 0.3, {}, MIXTURE),
]


@pytest.mark.parametrize(("name", "value", "beside", "family"), IDLE)
def test_a_setting_acts_or_is_refused(
    name: str,
    value: Any,
    beside: dict[str, Any],
    family: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    """Before any work, in a run and in its prediction; and leaving it out helps.

    The keys that make it act are named, but not as advice, because another refusal may have advised against them.
    """
    dense = make_checkpoint()
    config = make_config(dense, **{name: value})
    for refused in (predict, compress):
        with pytest.raises(ConfigError, match=rf"^--set {name}={value} (needs|is for) .*; leave it out\.$") as told:
            refused(config)
        assert [flag for flag, _ in mentions(str(told.value))] == [f"--set {name}"]
    assert not Path(config.output).exists()
    predict(make_config(dense))
    checkpoint = make_checkpoint(**CASES[family].options) if family else dense
    predict(make_config(checkpoint, **(beside | {name: value})))


@pytest.mark.parametrize(("name", "value"), [("residual_weight", 0.5), ("residual_target", "sublayer")])
def test_a_residual_without_the_dense_stream(
    name: str, value: Any, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    predict(make_config(make_checkpoint(), **{name: value}))
    for correction in ("same-layer", "none"):
        with pytest.raises(ConfigError, match=rf"^--set {name}={value} needs correction=two-stream; leave it out\.$"):
            predict(make_config(make_checkpoint(), correction=correction, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "beside", "acting"),
    [
        ("sketch", "count", {"ffn": "obs"}, {}),
        ("sketch_size", 96, {"recipe": "stat", "ffn": "obs"}, {"recipe": "stat"}),
        ("pivoting", "grouped", {"ffn": "wanda"}, {}),
        ("damping", 0.5, {"correction": "none"}, {"correction": "same-layer"}),
        ("damping", 0.5, {"correction": "bias"}, {"correction": "none", "form": "per-layer"}),
        ("layer_allocation", "stat", {"depth": "sensitivity"}, {"form": "per-layer"}),
        ("layer_allocation", "error", {"form": "per-layer", "allocation": "stat"}, {"form": "per-layer"}),
    ],
)
def test_another_setting_leaves_one_without_a_use(
    name: str,
    value: Any,
    beside: dict[str, Any],
    acting: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    with pytest.raises(ConfigError, match=rf"^--set {name}={value} (needs|is for) .*; leave it out\.$"):
        predict(make_config(make_checkpoint(), **beside, **{name: value}))
    predict(make_config(make_checkpoint(), **acting, **{name: value}))


def test_all_that_cannot_act_is_refused_at_once(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    settings = {name: value for name, value, _, _ in IDLE}
    with pytest.raises(ConfigError) as refused:
        predict(make_config(make_checkpoint(), **settings))
    assert [name for name in settings if f"--set {name}=" not in str(refused.value)] == []


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "stat"},  # which states a ridge of experts
        {"recipe": "stat", "ffn": "obs", "heads": "none", "correction": "none"},
        {"recipe": "flap", "form": "stock"},
        {"recipe": "stat", "sketch": "none", "pivoting": "cholesky"},
        {"recipe": "group-pca", "hidden": "none", "ffn": "id", "form": "per-layer"},
        {"sketch_size": 0, "group_size": 0, "value_features": "heads", "expert_residual_weight": 1.0},
    ],
    ids=str,
)
def test_what_a_recipe_states_and_what_is_usual_may_be_idle(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    predict(make_config(make_checkpoint(), **options))


def test_a_profile_is_for_runs_that_state_their_sizes_later(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    settings = {"value_features": "values", "form": "per-layer"}
    config = make_config(make_checkpoint(), **settings)
    profile(replace(config, output=str(tmp_path / "profile")))
    predict(make_config(make_checkpoint(), value_size=4, profile=str(tmp_path / "profile"), **settings))


def test_the_recipe_of_a_run_and_its_record_run_again(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(make_checkpoint(), recipe="stat", heads="none", form="per-layer", pivot_group_size=16)
    report = compress(config)
    recipe, again = Path(config.output) / "recipe.yaml", tmp_path / "again"
    assert main([f"--config={recipe}", f"--output={again}", "--quiet"]) == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (Path(config.output), again)]
    assert weights[0] == weights[1]
    predict(replace(Config.from_dict(report.config), output=str(tmp_path / "third")))
    compress(replace(config, resume=True))
