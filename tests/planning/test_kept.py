"""`--keep`: what stays has the input's bytes, in the forms that can hold it; the rest gives the share."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import Fails, MakeCheckpoint, MakeConfig
from families.cases import CASES
from safetensors.torch import load_file

from oneshot.architecture import TABLES
from oneshot.checkpoint import Checkpoint, identify
from oneshot.config import Config
from oneshot.errors import ConfigError, PlanError
from oneshot.pipeline import compress, predict
from oneshot.planning import find_kept
from oneshot.planning.kept import Kept

ALL = frozenset(range(3))
PATTERNS: dict[str, tuple[list[str], Kept]] = {
    "a layer": (["layers.0.*"], Kept(frozenset([0]), frozenset([0]))),
    "a layer by its name": (["model.layers.1"], Kept(frozenset([1]), frozenset([1]))),
    "attention": (["*.self_attn.*"], Kept(ALL)),
    "two FFNs": (["layers.[0-1].mlp.*"], Kept(ffn=frozenset([0, 1]))),
    "an FFN": (["layers.2.mlp"], Kept(ffn=frozenset([2]))),
    "linear by linear": (["layers.2.mlp.[gu]*", "layers.2.mlp.down_proj"], Kept(ffn=frozenset([2]))),
    "tables": (["embed_tokens"], Kept(tables=frozenset(["embedding"]))),
    "head": (["lm_head"], Kept(tables=frozenset(["output_head"]))),
    "all": (["*"], Kept(ALL, ALL, frozenset(TABLES))),
}


@pytest.mark.parametrize(("patterns", "kept"), PATTERNS.values(), ids=PATTERNS)
def test_patterns_are_on_names_of_modules(patterns: list[str], kept: Kept, make_checkpoint: MakeCheckpoint) -> None:
    model = identify(Checkpoint(make_checkpoint(layers=3)))
    assert find_kept(patterns, model.family, model.shape) == kept


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "qwen2_moe", "opt"])
def test_names_are_those_of_the_family(family: str, make_checkpoint: MakeCheckpoint) -> None:
    model = identify(Checkpoint(make_checkpoint(family=family, layers=2)))
    assert find_kept([f"{model.family.stack.layers}.1.*"], model.family, model.shape) == Kept(
        frozenset([1]), frozenset([1])
    )


@pytest.mark.parametrize("family", ["llama", "bert", "opt", "gpt_neox", "minimax_m2", "lfm2_moe", "falcon_h1", "t5"])
def test_patterns_that_are_advised_keep_something(family: str, tmp_path: Path) -> None:
    """Also those for what a part of a sublayer lacks."""
    CASES[family].build(**CASES[family].options).save_pretrained(tmp_path)
    model = identify(Checkpoint(tmp_path))
    with pytest.raises(ConfigError, match="such as ") as caught:
        find_kept(["nothing"], model.family, model.shape)
    advised = str(caught.value).partition("such as ")[2].removesuffix(".").replace(" or ", ", ").split(", ")
    assert len(advised) > 2
    for pattern in advised:
        assert find_kept([pattern], model.family, model.shape) != Kept()
    first = str(caught.value).partition("called as ")[2].partition(" is;")[0]
    with pytest.raises(ConfigError, match="a sublayer; ") as caught:
        find_kept([first], model.family, model.shape)
    also, _, part = str(caught.value).removesuffix(".").rpartition(" ")
    more = part if also.endswith("also keep") else f"*.0.*{part}.*"
    assert 0 in find_kept([first, more], model.family, model.shape).ffn


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["layers.9.*"], "--keep layers.9.* matches no linear"),
        (["layers.0.*", "nothing"], "--keep nothing matches no linear"),
        (["*.norm"], "matches no linear"),
        (["*.gate_proj"], "keep all of layer 0's mlp"),
        (["layers.1.self_attn.q_proj"], "keep all of layer 1's self_attn"),
    ],
)
def test_what_matches_nothing_or_a_part_is_refused(
    patterns: list[str], told: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=told.replace("*", r"\*")):
        predict(make_config(make_checkpoint(layers=3), form="per-layer", keep=patterns))


def test_a_share_that_what_is_kept_leaves_no_room_for_is_answered_with_that(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(layers=3)
    with pytest.raises(PlanError, match=r"; leave out --keep\.$"):
        predict(make_config(folder, form="per-layer", keep=["*"]))
    with pytest.raises(PlanError, match=r"; ask for --sparsity [\d.]+ or less, or .*leave out --keep\.$"):
        predict(make_config(folder, form="per-layer", keep=["layers.[01].*", "embed_tokens", "lm_head"], sparsity=0.3))


@pytest.mark.parametrize(
    ("form", "keep", "settings", "whole"),
    [
        ("per-layer", ["layers.0.*", "embed_tokens"], {"tied": True}, ["layers.0.", "embed_tokens"]),
        ("per-layer", ["*.self_attn.*", "layers.2.mlp"], {}, ["self_attn", "layers.2.mlp"]),
        ("per-layer", ["layers.1.mlp"], {"allocation": "uniform"}, ["layers.1.mlp", "self_attn"]),
        ("per-layer", ["layers.0.*"], {"heads": "id", "sparsity": 0.1}, ["layers.0."]),
        ("nemotron-nas", ["layers.0.*"], {}, ["layers.0.", "self_attn"]),
        ("stock", ["*.self_attn.*", "embed_tokens"], {}, ["self_attn", "embed_tokens"]),
    ],
    ids=str,
)
def test_what_is_kept_has_the_inputs_bytes(
    form: str,
    keep: list[str],
    settings: dict[str, Any],
    whole: list[str],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    tied = settings.pop("tied", False)
    folder = make_checkpoint(layers=3, tied=tied)
    config = make_config(folder, form=form, keep=keep, round_to=1, **settings)
    report = compress(config)
    before, after = load_file(folder / "model.safetensors"), load_file(Path(config.output) / "model.safetensors")
    for name, tensor in before.items():
        if any(part in name for part in whole) and "norm" not in name:
            assert tensor.equal(after[name]), name
    stored = report.stored_parameters
    assert 1 - stored["compressed"] / stored["dense"] == pytest.approx(config.target.sparsity, abs=0.01)
    written = json.loads((Path(config.output) / "oneshot_report.json").read_text())
    assert written["config"]["target"]["keep"] == keep
    assert f"Kept as they were: `{keep[0]}`" in (Path(config.output) / "README.md").read_text()
    assert compress(replace(config, resume=True)).fingerprint == report.fingerprint


def test_other_options_that_change_what_is_kept_are_refused(make_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = make_checkpoint(layers=3)
    fails(
        folder,
        "--keep layers.0.mlp needs layers of different sizes",
        "add --form per-layer",
        form="stock",
        keep="layers.0.mlp",
    )
    one = make_checkpoint(layers=3, groups=1)  # FFNs and heads need the same
    for options in ({"recipe": "stat"}, {"recipe": "stat", "serve": "tp=2"}, {"settings": ["heads=id"]}):
        told = fails(one, "--keep layers.0.* needs layers", form="stock", keep="layers.0.*", **options)
        assert told.count("--keep") == 1
    for setting in ("hidden=pca", "depth=sensitivity", "inner_sizes=sensitivity"):
        fails(folder, "--keep layers.0.mlp and", settings=[setting], form="per-layer", keep="layers.0.mlp")
    with pytest.raises(ConfigError, match="is not a pattern"):
        Config.of(folder, "out", sparsity=0.1, keep=[""])
    assert Config.of(folder, "out", sparsity=0.1, keep="layers.0").target.keep == ("layers.0",)
    plain, kept = (Config.of(folder, "out", sparsity=0.1, **more).fingerprint() for more in ({}, {"keep": ["mlp"]}))
    assert plain != kept


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_ranks_are_reduced_beside_ffns_that_all_stay(
    tied: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, fails: Fails
) -> None:
    """`ffn=none` leaves nothing to reduce, and its sentence says so, and what does."""
    folder = make_checkpoint(layers=3, tied=tied)
    advice = "write --keep '*.mlp.*' in place of ffn=none"
    fails(folder, "Nothing may be reduced (ffn=none", advice, settings=["ffn=none"], form="per-layer", round_to=1)
    config = make_config(folder, form="per-layer", keep=["*.mlp.*"], sparsity=0.04, round_to=1)
    report = compress(config)
    assert all(layer["intermediate_size"] == 64 for layer in report.plan["layers"])
    before, after = load_file(folder / "model.safetensors"), load_file(Path(config.output) / "model.safetensors")
    for name, tensor in before.items():
        if ".mlp." in name:
            assert tensor.equal(after[name]), name
    stored = report.stored_parameters
    assert 1 - stored["compressed"] / stored["dense"] == pytest.approx(0.04, abs=0.01)
    fails(folder, "gets down to", form="per-layer", keep="*.mlp.*", sparsity=0.8)
