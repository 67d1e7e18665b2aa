"""What the card and the command line say of engines that ask the number of layers or heads instead of the config.

The numbers are from llama.cpp (llama-cpp-python 0.3.36, `src/models/*.cpp`), mlx-lm 0.32.2, vLLM 0.32 and
SGLang 0.5.23.
"""

import json
import logging
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from damage import edit_config
from factories import MakeCheckpoint, MakeConfig
from families.cases import variants
from transformers import AutoConfig

from oneshot.checkpoint import per_layer_lists, with_kept_layers
from oneshot.export.engines import (
    HEADS_FILL_HIDDEN_SIZE,
    KINDS_BY_NUMBER,
    NAMES,
    NEURONS_OF_HIDDEN_SIZE,
    notes_on_engines,
)
from oneshot.export.served import reason_against_result
from oneshot.export.stock import StockForm
from oneshot.families import find_family
from oneshot.pipeline import compress
from oneshot.serving import Engine

SCALES: dict[str, dict[str, Any]] = {name: {"query_pre_attn_scalar": 16} for name in ("gemma2", "gemma3_text")}
ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def stock(family: str, layers: int = 12, **options: Any) -> dict[str, Any]:
    """Return the config.json of a dense model."""
    config: dict[str, Any] = AutoConfig.for_model(family, **SIZES, num_hidden_layers=layers, **options).to_dict()
    return config


def cut(config: dict[str, Any], layer: int) -> dict[str, Any]:
    """Return the config.json of a stock result without one layer."""
    kept = [number for number in range(config["num_hidden_layers"]) if number != layer]
    return with_kept_layers(config, kept, find_family(config))


def documented(changed: str, engine: str) -> set[str]:
    """Return the families of an engine in the table of docs/engines.md, of what has changed or "the same"."""
    lines = (ROOT / "docs" / "engines.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.count("|") == 5]
    starts = list(accumulate((one[1] for one in cells), lambda before, here: before if here == "the same" else here))
    found = [one[3] for start, one in zip(starts, cells, strict=True) if start.startswith(changed) and one[2] == engine]
    return set(found[0].split(", "))


def test_the_page_names_the_families() -> None:
    for name in NAMES:
        engine = "vLLM's own class" if name == "vLLM" else name
        moved = {family for family, names in KINDS_BY_NUMBER.items() if name in names}
        assert documented("layers have moved", engine) == moved
        assert documented("heads × head size", engine) == set(HEADS_FILL_HIDDEN_SIZE[name])
        assert documented("FFN neurons", engine) == set(NEURONS_OF_HIDDEN_SIZE[name])


@pytest.mark.parametrize(
    ("family", "options", "engines"),
    [
        ("gemma3_text", {"query_pre_attn_scalar": 16}, "llama.cpp and mlx-lm"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "llama.cpp and SGLang"),
        ("cohere2", {}, "llama.cpp and mlx-lm"),
        ("smollm3", {}, "llama.cpp"),
        ("gpt_oss", {}, "llama.cpp and vLLM"),
        ("qwen3_next", {}, "llama.cpp, mlx-lm and SGLang"),
        ("qwen3_5_text", {}, "llama.cpp, mlx-lm and SGLang"),
    ],
)
def test_a_layer_that_moves_the_others_is_told(family: str, options: dict[str, Any], engines: str) -> None:
    """The last layer moves no other, and where all layers are alike none matters."""
    dense = stock(family, **options)
    assert notes_on_engines(dense) == []
    assert notes_on_engines(cut(dense, 11)) == []
    (note,) = notes_on_engines(cut(dense, 2))
    assert note.startswith(f"{engines} would compute another model")
    assert StockForm().loading(cut(dense, 2) | {"architectures": None}).endswith(note)


@pytest.mark.parametrize("family", KINDS_BY_NUMBER)
def test_a_config_of_which_its_class_could_not_make_the_stated_kinds(family: str) -> None:
    """Such a config opens because it states them. EXAONE 4.0 is published with letters, and without windows."""
    dense = stock(family, **SCALES.get(family, {}))
    for name in ("sliding_window_pattern", "full_attention_interval"):
        without = dense | {name: None}
        if family != "exaone4":  # without a pattern it has no windows
            assert notes_on_engines(without) == []
        assert per_layer_lists(without) == per_layer_lists(dense)
        notes_on_engines(cut(without, 2))


def test_letters_of_exaone() -> None:
    lettered = stock("exaone4", sliding_window=8, sliding_window_pattern=4) | {"sliding_window_pattern": "LLLG"}
    assert not any("have moved the others" in note for note in notes_on_engines(lettered))
    assert any("have moved the others" in note for note in notes_on_engines(cut(lettered, 2)))
    whole = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 12}
    assert notes_on_engines(cut(lettered | whole, 2)) == []


@pytest.mark.parametrize(
    "stated",
    [
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 4},
        {"sliding_window_pattern": "LLLG", "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ],
    ids=["1.2B", "32B"],
)
def test_a_stock_result_of_exaone_as_published(
    stated: dict[str, Any], own_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = own_checkpoint(family="exaone4", layers=4, sliding_window=6, sliding_window_pattern=4)
    edit_config(folder, **stated)
    output = compress(make_config(folder, form="stock")).config["output"]
    config = AutoConfig.from_pretrained(output)
    assert config.layer_types == stated["layer_types"]
    assert config.intermediate_size < 64


def test_families_of_equal_layers_are_not_told() -> None:
    for family in ("llama", "qwen2", "qwen3", "mistral", "olmo2", "granite"):
        assert notes_on_engines(cut(stock(family), 2)) == []


@pytest.mark.parametrize(
    ("dense", "note"),
    [
        (stock("gemma2", 46, query_pre_attn_scalar=16), "45 layers it scales scores by 1/√20 instead of 1/√16"),
        (stock("gemma3_text", 62, query_pre_attn_scalar=16), "61 layers it scales scores by 1/√20 instead of 1/√16"),
        (stock("exaone4", 64, sliding_window=8, sliding_window_pattern=4), "the attention windows with 64 layers only"),
        *(
            (stock(family, 28), "27 layers it expects queries without q_lora_rank")
            for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
        ),
        (stock("deepseek_v3", 49, vocab_size=128256), "48 layers it expects queries without q_lora_rank"),
        (stock("deepseek_v2", 26, q_lora_rank=None), "25 layers it expects queries with q_lora_rank"),
    ],
    ids=lambda one: one["model_type"] if isinstance(one, dict) else "",
)
def test_a_number_of_layers_that_engines_ask_is_told(dense: dict[str, Any], note: str) -> None:
    if "query_pre_attn_scalar" in dense:
        dense = dense | {"head_dim": 20}  # as Gemma 2 27B has heads of 128 where 144 scale
    assert notes_on_engines(dense) == []
    last = dense["num_hidden_layers"] - 1
    assert note in " ".join(notes_on_engines(cut(dense, last)))


def test_fewer_heads_are_told_where_an_engine_cannot_hold_them(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """On the command line, which shows warnings, and on the card."""
    folder = make_checkpoint(family="qwen2")
    config = make_config(folder, recipe="magnitude", heads="id", head_unit="kv-group", sparsity=0.3)
    with caplog.at_level(logging.WARNING):
        compress(config)
    note = "llama.cpp does not open it, because its architecture of qwen2 wants heads that fill the hidden size (2 × 8"
    assert note in caplog.text
    assert note in (Path(config.output) / "README.md").read_text()
    fewer = {"num_attention_heads": 2, "num_key_value_heads": 1}
    for family in ("llama", "mistral", "qwen3", "smollm3", "glm4", "seed_oss", "ernie4_5", "arcee"):
        assert notes_on_engines(stock(family) | fewer) == []
    for family in ("granite", "granitemoe", "glm", "lfm2_moe", "starcoder2", "nemotron", "phi3", "cohere"):
        assert "does not open it" in notes_on_engines(stock(family) | fewer)[0]


def test_numbers_of_layers_are_those_of_the_result() -> None:
    """Of Qwen those before windows, of GLM-4.7-Flash those before experts, of LFM2 those with attention."""
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
    for family in ("qwen2", "qwen3"):
        config = cut(stock(family, 3, **windows), 0)
        assert config["layer_types"] == ["full_attention", "sliding_attention"]
        assert config["max_window_layers"] == 1
        assert cut(stock(family, 3), 0)["max_window_layers"] == stock(family, 3)["max_window_layers"]
    lite = stock("glm4_moe_lite", 3, mlp_layer_types=["dense", "sparse", "sparse"]) | {"first_k_dense_replace": 1}
    for layer, count in ((0, 0), (1, 1)):
        assert cut(lite, layer)["first_k_dense_replace"] == count
        assert cut(lite, layer)["scoring_func"] == "sigmoid"
    lfm2 = stock("lfm2", 4, layer_types=["conv", "full_attention", "conv", "full_attention"])
    config = cut(lfm2 | {"full_attn_idxs": [1, 3]}, 0)
    assert config["full_attn_idxs"] == [0, 2]
    assert config["layer_types"] == ["full_attention", "conv", "full_attention"]
    assert "full_attn_idxs" not in cut({name: lfm2[name] for name in lfm2.keys() - {"full_attn_idxs"}}, 0)


def test_kinds_of_layers_keep_the_words_of_the_input() -> None:
    """Granite 4's files say mamba and attention, which transformers 5 calls otherwise and llama.cpp does not."""
    kinds = ["mamba", "attention", "mamba", "attention"]
    config = AutoConfig.for_model("granitemoehybrid", **SIZES, num_hidden_layers=4, layer_types=kinds).to_dict()
    assert cut(config | {"layer_types": kinds}, 0)["layer_types"] == kinds[1:]
    assert cut(config, 0)["layer_types"] == config["layer_types"][1:]


@pytest.mark.parametrize("stated", [64, 96])
def test_granite_without_experts_states_both_widths(
    stated: int, own_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """llama.cpp and mlx-lm read the other one than transformers, so both change if the input states one width."""
    folder = own_checkpoint(**variants()["granitemoehybrid"])
    edit_config(folder, intermediate_size=stated)
    output = compress(make_config(folder, form="stock", recipe="magnitude", sparsity=0.05)).config["output"]
    config = json.loads((Path(output) / "config.json").read_text())
    assert config["shared_intermediate_size"] < 64
    assert config["intermediate_size"] == (config["shared_intermediate_size"] if stated == 64 else stated)


def test_what_engines_take_for_granted_is_told() -> None:
    """The width of FFNs, that they have no biases, and that an EXAONE 4.0 with windows has a layer with one."""
    for name, families in NEURONS_OF_HIDDEN_SIZE.items():
        for family in families:
            width = find_family({"model_type": family}).sizes.intermediate_size
            dense = AutoConfig.for_model(family, hidden_size=64).to_dict() | {width: 256}
            assert not any("many neurons" in note for note in notes_on_engines(dense))
            (note,) = (note for note in notes_on_engines(dense | {width: 192}) if "many neurons" in note)
            assert name in note.partition(" it does not open")[0]
            assert "(192 is not 4 × 64)" in note
            assert note.removesuffix(".") in str(reason_against_result(NAMES[name], dense | {width: 192}))
    (note,) = notes_on_engines(stock("llama") | {"mlp_bias": True})
    assert note.startswith("SGLang would compute another model")
    windowed = stock("exaone4", 4, sliding_window=8, sliding_window_pattern=4)
    assert not any("rotates the queries" in note for note in notes_on_engines(windowed))
    without = windowed | {"layer_types": ["full_attention"] * 4}
    assert any("rotates the queries" in note for note in notes_on_engines(without))
    assert not any("rotates the queries" in note for note in notes_on_engines(without | {"sliding_window": None}))


@pytest.mark.parametrize("sizes", [{"num_attention_heads": 2}, {"head_dim": 32}], ids=str)
@pytest.mark.parametrize(("name", "engine"), [("vLLM", "vllm"), ("SGLang", "sglang"), ("mlx-lm", "mlx")])
def test_heads_that_do_not_fill_the_hidden_size_are_told_of_an_engine(
    name: str, engine: Engine, sizes: dict[str, int]
) -> None:
    """Of fewer heads, or of wider ones, its class makes another head size."""
    for family in HEADS_FILL_HIDDEN_SIZE[name]:
        dense = {"head_dim": 16} | stock(family, intermediate_size=256)
        assert not any("head size" in note for note in notes_on_engines(dense))
        note = notes_on_engines(dense | sizes)[-1]
        assert name in note.partition(" it does not open or is another model")[0]
        reason = reason_against_result(engine, dense | sizes)
        assert reason is not None
        assert reason.startswith(note.removesuffix("."))
