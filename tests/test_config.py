"""Configs from flat options, dictionaries and recipe files; values of wrong types; what was probably meant."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from factories import MakeCheckpoint, MakeConfig
from safetensors.torch import load_file

from oneshot import Config, OneshotError
from oneshot.cli import init
from oneshot.cli.compress import build_parser
from oneshot.cli.main import main
from oneshot.cli.options import parse_config
from oneshot.config import default_output
from oneshot.errors import ConfigError
from oneshot.pipeline import compress
from oneshot.settings import read_recipe, recipe_text

CONFIGS: list[dict[str, Any]] = [
    {"sparsity": 0.2},
    {"params": "5.5B", "recipe": "group-pca"},
    {"sparsity": 0.2, "recipe": "group-pca", "form": "stock", "seed": 3},
    {"sparsity": 0.1, "ffn": "obs", "damping": 1e-3, "heads": "id", "up_steps": 2, "round_to": 8},
    {"sparsity": 0.1, "damping": "auto", "max_memory": "8GiB", "max_shard_size": "2GB", "offload_dir": "scratch"},
    {"hidden_rate": 0.25, "recipe": "tcsp", "calibration": "a b.txt+self: 'x'", "num_sequences": 4, "batch_size": 2},
    {"sparsity": 0.3, "dtype": "bf16", "save_dtype": "fp16", "profile": "measured", "revision": "v1"},
]


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_a_config_survives_every_way_of_writing_it(options: dict[str, Any], tmp_path: Path) -> None:
    config = Config.of("org/model", "out", **options)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert Config.of(**config.options()) == config
    assert Config.from_dict(config.options()) == config
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(config))
    assert Config.of(**read_recipe(path, {"output": "out"})) == config
    assert parse_config(build_parser().parse_args([f"--config={path}", "-o", "out"])) == config


def test_numbers_and_texts_of_numpy_become_pythons(tmp_path: Path) -> None:
    """Or neither the recipe nor the report could be written, at the end of a run."""
    options: dict[str, Any] = {
        "sparsity": np.float64(0.2),
        "seed": np.int64(3),
        "form": np.str_("stock"),
        "damping": np.float32(0.5),
    }
    config = Config.of("in", "out", **options)
    assert config == Config.of("in", "out", sparsity=0.2, seed=3, form="stock", damping=0.5)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(config))
    assert Config.of(**read_recipe(path, {"output": "out"})) == config
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_paths_and_dtypes_of_torch_are_taken_as_texts() -> None:
    given = Config.of(Path("model"), Path("out"), sparsity=0.2, calibration=Path("a.txt"), dtype=torch.bfloat16)
    assert given == Config.of("model", "out", sparsity=0.2, calibration="a.txt", dtype="bfloat16")


@pytest.mark.parametrize(
    ("checkpoint", "options", "expected"),
    [
        ("org/Model-1B", {"sparsity": 0.2}, "Model-1B-oneshot-0.20"),
        ("some/where/tiny/", {"params": "900M"}, "tiny-oneshot-900M"),
        ("/a/model.Q8_0.gguf", {"sparsity": 0.125}, "model.Q8_0-oneshot-0.12"),
        ("org/model", {"hidden_rate": 0.2, "recipe": "tcsp"}, "model-oneshot"),
    ],
)
def test_the_output_has_a_name_without_being_asked_for(checkpoint: str, options: dict[str, Any], expected: str) -> None:
    config = Config.of(checkpoint, **options)
    assert config.output == expected == default_output(checkpoint, config.target)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"sparsity": "much"}, ("--sparsity", "'much'", "a number")),
        ({"sparsity": True}, ("--sparsity", "True", "a number")),
        ({"num_sequences": 4.5}, ("--num-sequences 4.5", "an integer")),
        ({"num_sequences": None}, ("--num-sequences None", "an integer")),
        ({"seed": "first"}, ("--seed", "'first'", "an integer")),
        ({"calibration": ["a", "b"]}, ("--calibration", "['a', 'b']", "a text")),
        ({"overwrite": "yes"}, ("overwrite", "'yes'", "true or false")),
        ({"ffn": 3}, ("ffn=3", "is of the type int; give id or obs")),
        ({"form": "pre-layer"}, ("--form pre-layer", "did you mean per-layer?")),
        ({"ffn": "wnda"}, ("ffn=wnda", "did you mean wanda?")),
        ({"dtype": "blfoat16"}, ("--dtype blfoat16", "did you mean bfloat16?")),
        ({"recipe": "onshot"}, ("--recipe onshot", "did you mean oneshot?")),
        ({"sparsty": 0.1}, ("sparsty is not an option", "did you mean sparsity?")),
        ({"max_memroy": "1GB"}, ("max_memroy is not an option", "did you mean max_memory?")),
        ({"wxyz": "red"}, ("wxyz is not an option, see --help and --help-methods.",)),
    ],
    ids=str,
)
def test_values_that_cannot_be_used_are_named(options: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.of("model", "out", **{"sparsity": 0.2} | options)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--sparisty=0.2"], "--sparisty is not an option; did you mean --sparsity?"),
        (["--callibration", "c4"], "--callibration is not an option; did you mean --calibration?"),
        (["--set", "ranks=none", "embedding=none"], "embedding=none stands alone; write --set before every setting"),
        (["--form=stok"], "did you mean stock?"),
        (["--dtype=blfoat16"], "did you mean bfloat16?"),
        (["--batch-size=four"], "--batch-size: invalid int value"),
    ],
    ids=str,
)
def test_a_usage_error_has_one_line_of_usage_and_what_was_meant(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compress", "model", *arguments])
    assert caught.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: oneshot compress CHECKPOINT --sparsity 0.2 [-o OUT] [options]"
    assert error.startswith("oneshot compress: error: ")
    assert reason in error


def test_a_misspelt_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compres", "model"]) == 2
    assert capsys.readouterr().err.endswith("did you mean compress?\n")


# Recipe files


def test_the_recipe_beside_a_result_makes_its_bytes_again(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    compress(make_config(make_checkpoint(), form="per-layer", round_to=1, seed=5))
    command = ["compress", "--config", str(tmp_path / "out" / "recipe.yaml"), "--quiet", "-o"]
    assert main([*command, str(tmp_path / "again")]) == 0
    for name in ("model.safetensors", "config.json", "recipe.yaml"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert main([*command, str(tmp_path / "other"), "--sparsity=0.25"]) == 0
    sizes = [
        sum(tensor.numel() for tensor in load_file(tmp_path / name / "model.safetensors").values())
        for name in ("out", "other")
    ]
    assert sizes[1] < sizes[0]


def test_what_is_given_replaces_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("checkpoint: a\nsparsity: 0.2\ndamping: 1e-3\nmax-memory: 8GiB\nform: per-layer\n")
    parser = build_parser()
    found = parse_config(parser.parse_args([f"--config={path}", "-o=out", "--params=1M", "--batch-size=2"]))
    expected = Config.of("a", "out", params="1M", damping=1e-3, max_memory="8GiB", form="per-layer", batch_size=2)
    assert found == expected
    assert parse_config(parser.parse_args(["b", f"--config={path}"])).checkpoint == "b"
    assert parse_config(parser.parse_args([f"--config={path}", "--set=damping=0.5"])).method.damping == 0.5
    path.write_text("checkpoint: a\nsparsity: 0.2\nkeep: [embed_tokens]\n")
    keeps = parser.parse_args([f"--config={path}", "--keep", "layers.0.*", "--keep", "layers.1.*", "layers.2.*"])
    assert parse_config(keeps).target.keep == ("layers.0.*", "layers.1.*", "layers.2.*")


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (None, ("recipe.yaml is not a file", "oneshot init")),
        ("{unfinished", ("recipe.yaml cannot be read as YAML", "oneshot init")),
        ("- a\n- b\n", ("option: value",)),
        ("checkpoint: a\nsparsty: 0.2\n", ("sparsty is not an option", "did you mean sparsity?")),
        ("checkpoint: a\nsparsity: 0.2\ncalibration: null\n", ("leaves calibration empty",)),
        ("checkpoint: null\nsparsity: 0.2\n", ("leaves checkpoint empty",)),
        ("checkpoint: here\nset: heads=id\n", ("line set:", "heads: id")),
        ("sparsity: 0.2\n", ("No checkpoint is given",)),
        ("checkpoint: a\nsparsity: a fifth\n", ("--sparsity", "a fifth")),
    ],
    ids=str,
)
def test_recipes_that_cannot_be_used(
    content: str | None, names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_text(content)
    assert main(["compress", f"--config={path}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    for name in names:
        assert name in line


def test_objects_in_memory_must_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(Config.of("a", "b", sparsity=0.2), in_memory=["calibration"]))
    assert "in memory" in path.read_text()
    with pytest.raises(OneshotError, match="leaves calibration empty"):
        read_recipe(path, {})
    assert read_recipe(path, {"calibration": "builtin"})["calibration"] == "builtin"


def test_init_writes_a_recipe_of_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines that are comments are options also, except for prose."""
    path = tmp_path / "mine.yaml"
    assert main(["init", str(path)]) == 0
    assert f"--config {path}" in capsys.readouterr().out
    assert Config.of(**read_recipe(path, {"output": "out"})) == Config.of("org/model", "out", sparsity=0.2)
    others = yaml.safe_load("\n".join(re.findall(r"^# (\w+: \S+) +#", init.example(), re.MULTILINE)))
    assert {"output", "params", "max_memory", "save_dtype"} <= others.keys()
    Config.of("org/model", **others)
    assert main(["init", str(path)]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "sparsity: 0.1\nheads: id\nsparsity: 0.5\n",
        "num_sequences: 4\nnum-sequences: 8\n",
        "params: 5\nparameters: 6\n",
        "a: {b: 1, b: 2}\n",
        "a: [{b: 1, b: 2}]\n",
    ],
)
def test_a_key_given_twice_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"recipe.yaml gives [a-z_-]+ twice; remove one of both"):
        read_recipe(path, {})
