"""Forms that `--serve engine=` chooses and refuses before any work; the words of the card, the report and a dry run."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig
from transformers import AutoConfig, Gemma2Config

from oneshot.errors import OneshotError, PlanError
from oneshot.export.served import FORMS_OPENED, IN_PLUGIN, NO_CLASS, reason_against_result
from oneshot.families import FAMILIES
from oneshot.pipeline import compress
from oneshot.run import open_run
from oneshot.serving import ENGINES

PLUGIN = Path(__file__).parents[2] / "vllm-plugin" / "oneshot_vllm" / "__init__.py"
GQA: dict[str, Any] = {"heads": 4, "groups": 2}


def test_the_lists_of_engines_have_known_engines_families_and_classes() -> None:
    assert FORMS_OPENED.keys() == ENGINES.keys() >= NO_CLASS.keys()
    assert {name for names in NO_CLASS.values() for name in names} <= FAMILIES.keys()
    stated = {
        target.id: ast.literal_eval(line.value)
        for line in ast.parse(PLUGIN.read_text()).body
        if isinstance(line, ast.Assign) and isinstance(target := line.targets[0], ast.Name)
    }
    assert sorted(IN_PLUGIN) == sorted((*stated["RESIZED"], *stated["RESIZED_MIXTURES"]))


@pytest.mark.parametrize(
    ("family", "serve", "form"),
    [
        ("llama", "tp=2", "per-layer"),
        ("llama", "engine=vllm,tp=2,pp=2", "per-layer"),
        ("llama", "engine=sglang,tp=2", "stock"),
        ("llama", "engine=trtllm", "stock"),
        ("llama", "engine=mlx", "stock"),
        ("llama", "engine=llama.cpp,group=32", "gguf"),
        ("gemma2", "engine=vllm", "per-layer"),
        ("gemma2", "engine=llama.cpp", "stock"),  # with a head of its own, for which llama.cpp has no place
        ("gemma3_text", "engine=llama.cpp", "gguf"),
        ("phi3", "engine=llama.cpp", "stock"),
    ],
)
def test_the_form_opens_in_the_engine_that_is_named(
    family: str, serve: str, form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(family=family, **GQA if family != "falcon" else {})
    with open_run(make_config(folder, form="auto", serve=serve)) as run:
        assert run.form.name == form
        assert str(run.grid.serving) == serve


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        (
            "llama",
            {"serve": "engine=sglang", "form": "per-layer"},
            "SGLang does not open --form per-layer; give --form",
        ),
        ("llama", {"serve": "engine=vllm", "form": "gguf"}, "vLLM does not open --form gguf; give --form per-layer"),
        ("falcon", {"serve": "engine=vllm", "form": "per-layer"}, "per-layer form of falcon; give --form stock"),
        ("opt", {"serve": "engine=mlx", "form": "auto"}, "MLX has no class for opt; leave engine=mlx out"),
        ("opt", {"serve": "engine=mlx", "form": "gguf"}, "MLX has no class for opt; leave engine=mlx out"),
        # only forms that hold the family and that open there are advised
        ("falcon", {"serve": "engine=llama.cpp", "form": "per-layer"}, "open --form per-layer; give --form stock, or"),
        (
            "falcon",
            {"serve": "engine=vllm", "form": "stock"},
            "vLLM it does not open, because the class of falcon",
        ),
        ("falcon", {"serve": "engine=vllm", "form": "gguf"}, "open --form gguf; give --form stock, or leave"),
        (
            "qwen2",
            {"serve": "engine=llama.cpp", "heads": "id"},
            "architecture of qwen2 wants heads that fill the hidden",
        ),
        (
            "qwen2",
            {"serve": "engine=vllm", "form": "stock", "heads": "id"},
            "In vLLM and mlx-lm it does not open or is another model, because the class of qwen2",
        ),
        ("llama", {"serve": "tp=3"}, "Layer 0 has 4 heads, which 3 GPUs cannot share equally; give --serve tp=2."),
        ("llama", {"serve": "group=64"}, "which groups of 64 do not divide; give --serve group=32."),
    ],
    ids=str,
)
def test_what_an_engine_does_not_open_is_refused_before_the_work(
    family: str, options: dict[str, Any], sentence: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(family=family, width=96, **(GQA if family != "opt" else {"groups": 4}))
    with pytest.raises(OneshotError) as caught:
        compress(make_config(folder, **options))
    assert sentence in str(caught.value)


def test_low_ranks_of_a_family_without_a_plan_of_transformers_are_refused(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(family="gemma2", width=96, **GQA)
    with open_run(make_config(folder, form="auto", serve="engine=vllm,tp=2")) as run:
        assert run.method.plans_ranks
    monkeypatch.setattr(Gemma2Config, "base_model_tp_plan", None)
    with pytest.raises(PlanError, match="so vLLM cannot share its low ranks; set ranks=none"):
        compress(make_config(folder, form="auto", serve="engine=vllm,tp=2"))


def test_an_engine_that_would_compute_another_model_is_refused() -> None:
    config = AutoConfig.for_model("gemma2", num_hidden_layers=44).to_dict()
    assert reason_against_result("vllm", config) is None
    refusal = reason_against_result("llama.cpp", config | {"layer_types": config["layer_types"][::-1]})
    assert refusal is not None
    assert refusal.startswith("llama.cpp and SGLang would compute another model")


def test_the_result_says_what_it_was_planned_for(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(make_checkpoint(**GQA), serve="engine=vllm,tp=2,group=8", form="per-layer")
    report = compress(config)
    layers = json.loads((tmp_path / "out" / "config.json").read_text())["layers"]
    assert all(layer["intermediate_size"] % 16 == 0 and layer["output_rank"] % 16 == 0 for layer in layers)
    assert report.config["target"]["serve"] == "engine=vllm,tp=2,group=8"
    assert report.config["target"]["round_to"] == 16
    said = "in vLLM, with tensor parallelism of 2 and groups of 8 weights"
    assert report.footprint is not None
    assert report.footprint.served == said
    assert f"Sizes were planned to open {said}." in (tmp_path / "out" / "README.md").read_text()
    assert "serve: engine=vllm,tp=2,group=8" in (tmp_path / "out" / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("quantise", "serve", "advice"), [("w4a16", "tp=4", "group=64"), ("fp8", "tp=4,group=32", "tp=4,group=16")]
)
def test_advised_groups_are_those_of_the_format(
    quantise: str, serve: str, advice: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """112 neurons of one of four GPUs are groups of 16, which w4a16 does not have."""
    folder = make_checkpoint(hidden=128, width=448, heads=8, groups=4)
    options: dict[str, Any] = {"quantise": quantise, "sparsity": 0.0}
    with pytest.raises(OneshotError, match=f"; give --serve {advice}\\.$"):
        compress(make_config(folder, serve=serve, **options))
    compress(make_config(folder, serve=advice, **options))
