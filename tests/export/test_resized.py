"""The per-layer form of families whose layers are not Llama's: the family's own class with other linears."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, assert_cache_changes_nothing, stored_numbers
from families.cases import CASES, variants
from last_states import assert_passes, keep_last_states
from opened_results import assert_it_writes_and_grows, load
from rotary import LLAMA3_ROTARY
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from oneshot.architecture import StackShape, TableShape
from oneshot.checkpoint import open_model
from oneshot.compression.embedding import expanded
from oneshot.errors import PlanError
from oneshot.export import stated_shape
from oneshot.export.companions import empty_tensors
from oneshot.export.modeling_oneshot_resized import (
    OneshotGemma3ForCausalLM,
    OneshotGemma3TextConfig,
    refuse_engine,
)
from oneshot.export.resized import ResizedForm
from oneshot.pipeline import compress
from oneshot.planning import LayerPlan, Plan, vocabulary_ranges

# of every type but the default
ROTARY_TYPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 128,
    },
    "llama3": LLAMA3_ROTARY,
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "opt", "phi3", "seed_oss")
RESIZED = {
    name: case.options
    for name, case in CASES.items()
    if case.packed and "per-layer form" not in case.refused and name not in LIKE_LLAMA
}
RESIZED |= {
    name: variants()[name]
    for name in (
        *("mistral-window", "phi3-window", "qwen2-windows", "granitemoehybrid-experts", "gemma4_text-experts"),
        "gemma4_text-tokens",
    )
}
# norms inside, caps, factors, parallel sublayers, fused and transposed linears, LayerNorms, layers without positions,
# carried mixers; experts with a shared one behind dense layers, with biases, beside an FFN
WHOLE_RUNS = ("gemma2", "gemma3_text", "olmo2", "exaone4", "glm4", "granite", "smollm3", "hunyuan_v1_dense")
WHOLE_RUNS += (
    "mistral-window",
    "phi3-window",
    "qwen2-windows",
    "cohere2",
    "phi",
    "gpt_neox",
    "falcon",
    "gpt2",
    "stablelm",
    "nemotron",
    "falcon_h1",
    "gemma4_text",
    "granitemoehybrid",
    "lfm2",
    "qwen3_5_text",
    "glm4_moe",
    "gpt_oss",
    "granitemoehybrid-experts",
    "gemma4_text-experts",
    "gemma4_text-tokens",
)
FEWER_EXPERTS = ("glm4_moe", "granitemoehybrid-experts")


@pytest.mark.parametrize("name", WHOLE_RUNS)
@torch.inference_mode()
def test_a_result_computes_what_the_stream_passed(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and ranks differ from layer to layer, as planned; the cache changes nothing."""
    last = keep_last_states(monkeypatch)
    keeps_heads = "heads" in CASES[name.partition("-")[0]].refused
    sizes: dict[str, Any] = {"heads": "none", "sparsity": 0.15} if keeps_heads else {"heads": "id", "sparsity": 0.2}
    if name in FEWER_EXPERTS:
        sizes |= {"experts": "effects", "sparsity": 0.3}
    config = make_config(make_checkpoint(**RESIZED[name]), form="per-layer", embedding="none", **sizes)
    report = compress(config)
    if name in FEWER_EXPERTS:
        assert min(layer["num_experts"] or 4 for layer in report.plan["layers"]) < 4
    result = load(Path(config.output))
    assert stored_numbers(result) == report.stored_parameters["compressed"]
    assert_passes(result, result.config.layers_name, config, last[0])
    assert_cache_changes_nothing(result, 6, input_ids=torch.arange(3, 8).unsqueeze(0))


def ranked(folder: Path) -> tuple[dict[str, Any], StackShape]:
    """Return a config with every kind of size that the class of a checkpoint can have, and the sizes."""
    model = open_model(str(folder), folder)
    form, shape = ResizedForm(), model.shape
    whole_heads = shape.num_attention_heads, shape.num_key_value_heads
    heads = (2, 1) if form.grid(model).heads_differ else whole_heads
    kinds = [kind for each in model.family.stack_of(0).sublayers for kind in each.mixer.ranked]
    ranks = dict.fromkeys(kinds, 7) if form.grid(model).has_ranks else {}
    layers = [LayerPlan(40, *heads, **{f"{kind}_rank": rank for kind, rank in ranks.items()}), LayerPlan(24, *heads)]
    whole = [LayerPlan(shape.intermediate_size, *whole_heads)] * (shape.num_hidden_layers - 2)
    rows = [part.stop - part.start for part in vocabulary_ranges(shape.vocab_size)]
    tables = tuple(TableShape(size, shape.hidden_size - 8 * number) for number, size in enumerate(rows[:4]))
    tables += tuple(TableShape(size, 8) for size in rows[4:])
    plan = Plan((*layers, *whole), "kv-group", embedding=tables if form.grid(model).ranks_embedding else ())
    return form.config(model, plan), form.grid(model).stack(plan)


@pytest.mark.parametrize("kind", ROTARY_TYPES)
def test_rotary_positions_of_a_type_of_layers(kind: str, own_checkpoint: MakeCheckpoint) -> None:
    """Most types ask the config by the type of layers, as in the larger Gemma 3, also if the layers' heads differ."""
    rotary = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": ROTARY_TYPES[kind] | {"rope_theta": 900.0},
    }
    folder = own_checkpoint(**RESIZED["gemma3_text"] | {"rope_parameters": rotary})
    config, _ = ranked(folder)
    config_class: Any = OneshotGemma3TextConfig
    made = OneshotGemma3ForCausalLM(config_class.from_dict(config))
    assert [one.num_key_value_heads for one in made.config.per_layer_config] == [1, 1, 2]
    assert [one.num_key_value_heads for one in made.config.per_layer_config[1:]] == [1, 2]
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_buffers())
    found = dict(made.named_buffers())
    for name in ("full_attention_inv_freq", "sliding_attention_inv_freq"):
        torch.testing.assert_close(found[f"model.rotary_emb.{name}"], expected[f"model.rotary_emb.{name}"])


@pytest.mark.parametrize("name", ["granitemoe", "gemma4_text-experts"])
def test_experts_are_computed_as_in_the_stock_class(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is set later reaches the experts of all layers, as `generate` does on a GPU."""
    folder = make_checkpoint(**RESIZED[name])
    config = make_config(folder, form="per-layer", embedding="none", sparsity=0.15)
    compress(config)
    dense = AutoModelForCausalLM.from_pretrained(folder)
    # where only the result is opened, transformers has not looked at the stock class yet
    monkeypatch.delattr(type(dense), "_can_set_experts_implementation_cached_value", raising=False)
    result = load(Path(config.output))

    def chosen(model: Any) -> list[str]:
        return [one.config._experts_implementation for one in model.modules() if type(one).__name__.endswith("Experts")]

    assert chosen(result) == chosen(dense) != []
    for choice in ("batched_mm", "eager"):
        result.set_experts_implementation(choice)
        assert set(chosen(result)) == {choice}
    result.set_experts_implementation({"": "grouped_mm"})
    assert set(chosen(result)) == {"grouped_mm"}


@pytest.mark.parametrize("name", ["gemma3_text", "falcon", "falcon_h1", "lfm2", "deepseek_v3"])
@torch.inference_mode()
def test_nothing_removed_is_the_input(name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = make_checkpoint(**RESIZED[name])
    config = make_config(folder, form="per-layer", sparsity=0)
    compress(config)
    tokens = torch.arange(3, 40).unsqueeze(0)
    assert torch.equal(
        load(Path(config.output))(tokens).logits, AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    )


@pytest.mark.parametrize(("name", "embedding"), [("gemma3_text", "auto"), ("gpt_neox", "none"), ("falcon_h1", "none")])
@torch.inference_mode()
def test_the_class_without_head_opens_it(
    name: str, embedding: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Engines build the stack by itself, as vLLM's Transformers backend does."""
    config = make_config(make_checkpoint(**RESIZED[name]), form="per-layer", embedding=embedding, sparsity=0.15)
    compress(config)
    alone = AutoModel.from_pretrained(config.output, trust_remote_code=True, dtype=torch.float32).eval()
    tokens = torch.arange(3, 40).unsqueeze(0)
    expected = load(Path(config.output)).base_model(tokens).last_hidden_state
    assert torch.equal(alone(tokens).last_hidden_state, expected)


@pytest.mark.parametrize(
    "name",
    [
        *("gemma3_text", "granite", "olmo2", "cohere", "smollm3", "falcon_h1", "granitemoehybrid", "lfm2"),
        *("qwen3_next", "deepseek_v3", "gpt_oss", "mixtral", "gemma4_text-experts", "gemma4_text-tokens"),
    ],
)
def test_any_plan_has_the_counted_parameters(name: str, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(**RESIZED[name] | {"tied": True})
    config, wanted = ranked(folder)
    stored = {name: one for name, one in empty_tensors(config).items() if name != "lm_head.weight"}
    assert stated_shape(config) == wanted
    assert sum(tensor.numel() for tensor in stored.values()) == wanted.stored_parameters()


@pytest.mark.parametrize("form", ["stock", "per-layer"])
def test_heads_that_a_config_has_factors_for_stay(
    form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Phi-3's config checks the factors of its long rotary positions by hidden size ÷ heads."""
    rotary = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0, 3.0, 4.0], "rope_theta": 1e4}
    rotary |= {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 16}
    folder = make_checkpoint(family="phi3", rope_parameters=rotary, original_max_position_embeddings=16)
    with pytest.raises(PlanError, match=r"use --set heads=none\.$"):
        compress(make_config(folder, form=form, heads="id", sparsity=0.15))
    config = make_config(folder, form=form, sparsity=0.1)
    compress(config)
    report = json.loads((Path(config.output) / "oneshot_report.json").read_text())
    assert {layer["num_attention_heads"] for layer in report["plan"]["layers"]} == {4}


def test_an_engine_with_experts_of_one_width_is_refused() -> None:
    layer = {"attention": "self_attn", "mixture": {"modules": ["mlp"], "config": {"intermediate_size": 24}}}
    refuse_engine(SimpleNamespace(resized=[layer], _attn_implementation="sdpa"))
    with pytest.raises(ValueError, match="experts of one width in all layers; install the plugin oneshot-vllm"):
        refuse_engine(SimpleNamespace(resized=[layer], _attn_implementation="vllm"))
    refuse_engine(SimpleNamespace(resized=[layer], _attn_implementation="vllm", engine_has_own_widths=True))


@torch.inference_mode()
def test_ranks_of_a_scaled_embedding(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path, tmp_path: Path
) -> None:
    """The checkpoint opens, writes, is saved again, and is evaluated; its tables stand for one embedding."""
    folder = make_checkpoint(**RESIZED["gemma3_text"] | {"hidden": 48})
    config = make_config(folder, form="per-layer", sparsity=0.4, heads="id")
    report, output = compress(config), Path(config.output)
    model, tokens = load(output), torch.arange(3, 40).unsqueeze(0)
    stated = json.loads((output / "config.json").read_text())
    assert len({table["rank"] for table in stated["embedding_ranges"]}) > 1
    assert len({layer["num_attention_heads"] for layer in stated["sizes"]["layers"]}) > 1
    embedding = expanded(load_file(output / "model.safetensors"), 48)
    inner: Any = model.model
    torch.testing.assert_close(inner.embed_tokens(tokens), embedding[tokens] * 48**0.5, rtol=1e-4, atol=1e-5)
    states = inner(tokens).last_hidden_state
    torch.testing.assert_close(model(tokens).logits, states @ embedding.T, rtol=1e-4, atol=1e-4)
    # a device has the whole embedding or nothing of it, and weights have another order
    expected = model(tokens).logits
    for limit in range(20_000, 120_000, 20_000):
        limits: dict[str | int, int] = {"cpu": limit}
        shared = AutoModelForCausalLM.from_pretrained(
            output, trust_remote_code=True, device_map="auto", max_memory=limits, offload_folder=str(tmp_path / "disk")
        )
        torch.testing.assert_close(shared(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    model.lay_out_()
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert_it_writes_and_grows(model, report, text_file, tmp_path)
