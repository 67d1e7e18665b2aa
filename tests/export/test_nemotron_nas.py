"""The form nemotron-nas: the model of the per-layer form where both can hold it, and what engines read of it."""

import ast
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, MakeResult, assert_cache_changes_nothing, build_model, silence
from hypothesis import given
from hypothesis import strategies as st

from oneshot import OneshotError
from oneshot.architecture.stated_shapes import ffn_width
from oneshot.config import Config
from oneshot.evaluation.evaluate import evaluate
from oneshot.evaluation.models import load_model
from oneshot.export.nemotron_nas import MODELLING_FILE
from oneshot.pipeline import compress

CPU = torch.device("cpu")
TOKEN_IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(1))
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "large-heads": {"head_dim": 16},
    "qwen2": {"family": "qwen2"},
    "phi3": {"family": "phi3"},
    "seed_oss": {"family": "seed_oss", "head_dim": 8, "attention_bias": True},
    "mistral": {"family": "mistral"},
}


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(folder, device=CPU, dtype=torch.float32)(TOKEN_IDS).logits


def config_of(folder: Path | str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())


@pytest.mark.parametrize(
    ("model", "recipe"),
    [*((model, "oneshot") for model in MODELS), *itertools.product(("untied", "tied", "biases"), ("stat", "flap"))],
)
def test_it_is_the_model_of_the_per_layer_form(
    model: str, recipe: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Every model, and every recipe where it writes other tensors: beside biases or without them, tied or not."""
    folder = make_checkpoint(layers=3, **MODELS[model])
    settings: dict[str, Any] = {"recipe": recipe, "heads": "none", "embedding": "none", "ranks": "none"}
    reports = {
        form: compress(make_config(folder, form=form, output=str(tmp_path / form), **settings))
        for form in ("nemotron-nas", "per-layer")
    }
    assert reports["nemotron-nas"].stored_parameters == reports["per-layer"].stored_parameters
    torch.testing.assert_close(logits(tmp_path / "nemotron-nas"), logits(tmp_path / "per-layer"), rtol=0, atol=1e-6)


@pytest.fixture(params=MODELS)
def compressed(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint, make_result: MakeResult) -> Path:
    return make_result(make_checkpoint(layers=3, **MODELS[request.param]), form="nemotron-nas")


def test_transformers_loads_it_with_remote_code_and_saves_it_again(compressed: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(compressed, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    with torch.inference_mode():
        first = model(TOKEN_IDS).logits
    torch.testing.assert_close(first, logits(compressed), rtol=0, atol=0)
    model.save_pretrained(tmp_path / "again")
    assert config_of(tmp_path / "again")["block_configs"] == config_of(compressed)["block_configs"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    with torch.inference_mode():
        torch.testing.assert_close(again(TOKEN_IDS).logits, first, rtol=0, atol=0)


def test_the_cache_and_the_attention_kernel_change_nothing(compressed: Path) -> None:
    model = load_model(compressed, device=CPU, dtype=torch.float32)
    settings = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 1}
    generated = model.generate(TOKEN_IDS[:1, :5], use_cache=True, **settings)
    assert torch.equal(model.generate(TOKEN_IDS[:1, :5], use_cache=False, **settings), generated)
    model.set_attn_implementation("eager")
    assert torch.equal(model.generate(TOKEN_IDS[:1, :5], use_cache=True, **settings), generated)


def test_engines_find_every_size(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(layers=3), form="nemotron-nas")
    report = compress(config)
    written = config_of(config.output)
    assert written["architectures"] == ["DeciLMForCausalLM"]
    assert written["model_type"] == "nemotron-nas"
    widths = [block["ffn"]["intermediate_size"] for block in written["block_configs"]]
    assert len(set(widths)) > 1
    assert all("ffn_mult" not in block["ffn"] for block in written["block_configs"])
    assert {block["attention"]["n_heads_in_group"] for block in written["block_configs"]} == {2}
    (result,) = evaluate([config.output], [], decode_tokens=0)
    assert result.stored_parameters == report.stored_parameters["compressed"]
    assert "vllm serve" in (Path(config.output) / "README.md").read_text()


def test_widths_in_multiples_of_256_are_stated_for_all_engines(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(layers=3, width=1024), form="nemotron-nas", round_to=256)
    compress(config)
    written, card = config_of(config.output), (Path(config.output) / "README.md").read_text()
    assert all(
        block["ffn"].keys() == {"no_op", "replace_with_linear", "ffn_mult"} for block in written["block_configs"]
    )
    assert {ffn_width(block["ffn"], 32) % 256 for block in written["block_configs"]} == {0}
    assert "MLX also have this architecture" in card
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]


@given(st.integers(1, 400), st.integers(16, 20_000))
def test_the_factor_states_a_width_exactly_also_rounded_to_six_digits(steps: int, hidden: int) -> None:
    """MLX rounds the factor; then it, SGLang, TensorRT-LLM and vLLM take the next multiple of 256."""
    factor = 3 * 256 * steps / (2 * hidden)
    assert ffn_width({"ffn_mult": factor}, hidden) == 256 * steps
    assert ffn_width({"ffn_mult": round(factor, 6)}, hidden) == 256 * steps


def test_heads_are_removed_equally_in_all_layers(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(
        make_checkpoint(layers=3, heads=8, groups=4, head_dim=16),
        form="nemotron-nas",
        heads="id",
        head_unit="kv-group",
        sparsity=0.5,
    )
    report = compress(config)
    written = config_of(config.output)
    assert written["num_attention_heads"] < 8
    assert report.predicted_divergence is not None
    assert report.predicted_divergence["per-layer"] <= report.predicted_divergence["nemotron-nas"]
    assert logits(Path(config.output)).isfinite().all()


def test_whole_layers_are_left_out(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path) -> None:
    folder = make_checkpoint(layers=4)
    for form in ("nemotron-nas", "per-layer"):
        compress(
            make_config(
                folder,
                form=form,
                depth="sensitivity",
                embedding="none",
                ranks="none",
                sparsity=0.45,
                output=str(tmp_path / form),
            )
        )
    assert config_of(tmp_path / "nemotron-nas")["num_hidden_layers"] < 4
    torch.testing.assert_close(logits(tmp_path / "nemotron-nas"), logits(tmp_path / "per-layer"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_idle_sublayers_go_but_the_first_attention(
    options: dict[str, Any], save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    """Compare with the dense model, whose idle sublayers add nothing."""
    model = build_model(layers=4, **options)
    silence(model, attention=[0, 2], ffn=[1, 3])
    folder = save_model(model)
    attention = sum(one.numel() for name, one in model.model.layers[2].named_parameters() if "mlp" not in name)
    attention -= model.config.hidden_size  # the norm of the FFN stays
    ffn = sum(one.numel() for one in model.model.layers[1].mlp.parameters()) + model.config.hidden_size
    dense = sum(one.numel() for one in model.parameters())
    settings: dict[str, Any] = {"depth": "sublayers", "ffn": "none", "correction": "none"}
    config = make_config(folder, form="nemotron-nas", parameters=dense - attention - 2 * ffn, **settings)
    report = compress(config)
    assert report.stored_parameters["compressed"] == dense - attention - 2 * ffn
    blocks = config_of(config.output)["block_configs"]
    assert [block["attention"]["no_op"] for block in blocks] == [False, False, True, False]
    assert [block["ffn"]["no_op"] for block in blocks] == [False, True, False, True]
    assert blocks[2]["attention"]["n_heads_in_group"] is None
    assert blocks[1]["ffn"]["ffn_mult"] is None
    result = load_model(Path(config.output), device=CPU, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(result(TOKEN_IDS).logits, model(TOKEN_IDS).logits, rtol=1e-4, atol=1e-4)
    assert_cache_changes_nothing(result, 8, input_ids=TOKEN_IDS)
    (evaluated,) = evaluate([config.output], [], decode_tokens=0)
    assert evaluated.stored_parameters == report.stored_parameters["compressed"]


@pytest.mark.parametrize("heads", ["none", "id"])
def test_sublayers_go_beside_narrower_ones(
    heads: str, save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    model = build_model(layers=4, heads=8, groups=4, head_dim=16)
    silence(model, attention=[2], ffn=[1])
    settings: dict[str, Any] = {"depth": "sublayers", "heads": heads, "round_to": 4, "sparsity": 0.4}
    config = make_config(save_model(model), form="nemotron-nas", **settings)
    report = compress(config)
    written = config_of(config.output)
    assert written["block_configs"][2]["attention"]["no_op"]
    assert written["block_configs"][1]["ffn"]["no_op"]
    assert {layer["num_attention_heads"] for layer in report.plan["layers"]} == {0, written["num_attention_heads"]}
    assert report.sparsity["reached"] == pytest.approx(0.4, abs=0.02)
    assert logits(Path(config.output)).isfinite().all()


def test_the_hidden_size_shrinks_in_one_subspace(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_checkpoint(layers=3, tied=True)
    for form in ("nemotron-nas", "stock"):
        compress(make_config(folder, form=form, recipe="tcsp", hidden_size=24, output=str(tmp_path / form)))
    torch.testing.assert_close(logits(tmp_path / "nemotron-nas"), logits(tmp_path / "stock"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        ({"family": "qwen3", "head_dim": 8}, {}, "norms of queries and keys"),
        ({"family": "opt"}, {}, "RMSNorms"),
        ({"family": "mistral", "sliding_window": 8}, {}, "no sliding attention window"),
        ({"hidden_act": "gelu"}, {}, "the model's is gelu"),
        ({}, {"value_size": 4}, "needs --form per-layer; add it"),
        ({}, {"recipe": "group-pca", "group_size": 1, "hidden_size": 24}, "shortcut matrices"),
        ({"tied": True}, {"embedding": "low-rank"}, "--form per-layer"),
    ],
    ids=["query-norms", "layer-norms", "window", "activation", "inside-heads", "groups", "ranks"],
)
def test_what_it_cannot_hold_is_refused_before_any_work(
    model: dict[str, Any],
    options: dict[str, Any],
    sentence: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    config: Config = make_config(make_checkpoint(**model), form="nemotron-nas", **options)
    with pytest.raises(OneshotError, match=sentence):
        compress(config)
    assert not Path(config.output).with_name("out.incomplete").exists()


def test_the_stock_form_does_not_hold_it(compressed: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(OneshotError, match="use --form per-layer"):
        compress(make_config(compressed, output=str(tmp_path / "twice")))


def test_the_modelling_file_stands_alone_and_reads_widths_alike() -> None:
    from oneshot.export.modeling_nemotron_nas import width_of

    modules = set()
    for node in ast.walk(ast.parse(MODELLING_FILE.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    assert modules == {"copy", "typing", "torch", "huggingface_hub", "transformers"}
    for ffn in ({"intermediate_size": 200}, {"ffn_mult": 1.3}, {"ffn_mult": 2.0}):
        assert width_of(ffn, 576) == ffn_width(ffn, 576)
