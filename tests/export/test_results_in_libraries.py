"""Results of every form in peft's adapters, in transformers' caches and exports, and in the hands of quantisers."""

import inspect
import json
import textwrap
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import build_model, randomise
from families.cases import CASES
from safetensors.torch import load_file, save_file

from oneshot.architecture import ModelShape, TableShape
from oneshot.checkpoint import open_model
from oneshot.evaluation import load_model
from oneshot.export import form_of
from oneshot.export.companions import OWN_CLASSES
from oneshot.export.per_layer import per_layer_config
from oneshot.planning import LayerPlan, Plan

IDS = torch.randint(2, 400, (1, 12), generator=torch.Generator().manual_seed(1))
WRITING: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
SHAPE = ModelShape(3, 32, 64, 4, 2, 8, vocab_size=400)
LAYER = SHAPE.layer()
NO_ATTENTION = replace(LAYER, num_attention_heads=0, num_key_value_heads=0)
FEWER_HEADS = replace(LAYER, num_attention_heads=2, num_key_value_heads=1)
LOW_RANK = replace(LAYER, intermediate_size=40, query_key_rank=12, output_rank=10, gate_rank=16, up_rank=8)
INSIDE = replace(LAYER, query_key_size=4, value_size=6, rotary_selected=True)
RANKS = {"query_key_rank": 7, "output_rank": 7, "gate_rank": 7, "up_rank": 7}
CONFIG = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
CONFIG |= {"bos_token_id": 0, "pad_token_id": 1, "model_type": "llama", "head_dim": 8}


def random_result(config: dict[str, Any]) -> Any:
    """Return a random model of the class of a result's config.json."""
    config_class, model_class = OWN_CLASSES[config["model_type"]](config)
    model = randomise(model_class(config_class.from_dict(config)), 0).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("columns"):
            buffer.copy_(torch.randperm(len(buffer), generator=torch.Generator().manual_seed(2)))
        if name.endswith("rotary_pairs"):
            buffer.copy_(torch.tensor([[0, 1], [1, 3]]))
    return model


def planned(
    form: str, options: dict[str, Any], layers: list[LayerPlan], folder: Path, embedding: tuple[TableShape, ...] = ()
) -> Any:
    """Return a random result of a plan, whose further layers are whole."""
    build_model(**options).save_pretrained(folder)
    model = open_model(str(folder), folder)
    shape = model.shape
    whole = LayerPlan(shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads)
    plan = Plan((*layers, *[whole] * (shape.num_hidden_layers - len(layers))), "kv-group", embedding=embedding)
    return random_result(form_of(form, model.family).config(model, plan))  # type: ignore[arg-type]


def per_layer(*layers: Any, **changes: Any) -> Callable[[Path], Any]:
    """Return what makes a result in Llama's style with these layers, and `changes` of the other sizes."""
    return lambda _: random_result(per_layer_config(CONFIG, SHAPE, replace(SHAPE.stack(), layers=layers, **changes)))


HEADS, FEWER = LayerPlan(40, 4, 2), LayerPlan(24, 2, 1, **RANKS)
RESULTS: dict[str, Callable[[Path], Any]] = {
    "low ranks": per_layer(LAYER, LOW_RANK, LAYER),
    "no attention later": per_layer(LAYER, NO_ATTENTION, LAYER),
    "no attention first": per_layer(NO_ATTENTION, FEWER_HEADS, LAYER),
    "sizes inside heads": per_layer(LAYER, INSIDE, LAYER),
    "nemotron-nas": lambda folder: planned(
        "nemotron-nas", {"layers": 3}, [HEADS, LayerPlan(24, 0, 0), LayerPlan(40, 4, 1)], folder
    ),
    "gemma3": lambda folder: planned("per-layer", CASES["gemma3_text"].options, [FEWER, HEADS], folder),
    "gemma3 of equal heads": lambda folder: planned(
        "per-layer", CASES["gemma3_text"].options, [LayerPlan(40, 4, 2, **RANKS)], folder
    ),
}
RANGES = TableShape(100, 32), TableShape(300, 12)  # of the vocabulary
WITH_RANGES: dict[str, Callable[[Path], Any]] = {
    "ranges": per_layer(LAYER, LOW_RANK, LAYER, head="tied", embedding=RANGES),
    "gemma3 with ranges": lambda folder: planned(
        "per-layer", CASES["gemma3_text"].options, [LayerPlan(40, 4, 2, **RANKS)], folder, RANGES
    ),
}
NO_FFN, ONE_RANK = replace(LAYER, intermediate_size=0), replace(LAYER, up_rank=8)
PLAIN = replace(LAYER, gated=False, num_key_value_heads=4, attention_bias=True, output_bias=True, mlp_bias=True)
SMOOTHED: dict[str, Callable[[Path], Any]] = {
    "smoothed": per_layer(LAYER, LOW_RANK, NO_ATTENTION, NO_FFN, ONE_RANK, FEWER_HEADS),
    "smoothed, positions": per_layer(PLAIN, replace(PLAIN, output_rank=16), PLAIN, num_positions=64),
}
MADE = RESULTS | WITH_RANGES | SMOOTHED


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in made:
            made[name] = MADE[name](tmp_path_factory.mktemp("dense"))
            made[name].generation_config.eos_token_id = None
        return made[name]

    return of


@pytest.mark.parametrize("name", RESULTS)
def test_a_static_cache_filled_early_changes_nothing(name: str, results: Callable[[str], Any]) -> None:
    """Every layer finds its heads and sizes in the place that transformers gives it; windows and drafts also."""
    model = results(name)
    plain = model.generate(IDS, **WRITING)
    for how in ({"cache_implementation": "static", "prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 2}):
        assert torch.equal(model.generate(IDS, **WRITING, **how), plain), how


def exported(model: Any) -> Any:
    """Return the program of a model with a static cache, which is filled before the program is made."""
    from transformers import GenerationConfig
    from transformers.integrations.executorch import convert_and_export_with_cache

    before = model.generation_config
    sizes = {"batch_size": 1, "max_cache_len": 20}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=sizes)
    try:
        return convert_and_export_with_cache(model, strict=False).module()
    finally:
        model.generation_config = before


@pytest.mark.parametrize("name", ["no attention first", "nemotron-nas", "gemma3"])
@torch.no_grad()
def test_an_exported_program_with_its_cache_computes_the_same(name: str, results: Callable[[str], Any]) -> None:
    program = exported(results(name))
    steps = [program(input_ids=IDS[:, at : at + 1], cache_position=torch.tensor([at])) for at in range(IDS.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), results(name)(IDS).logits, rtol=1e-4, atol=1e-4)


def test_keys_and_values_of_different_sizes_are_refused_in_an_export(results: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="2 heads of 4 numbers, but the values of a layer have 2 heads of 6"):
        exported(results("sizes inside heads"))


@pytest.mark.parametrize("name", ["low ranks", "gemma3 of equal heads"])
def test_continuous_batching_writes_the_same(name: str, results: Callable[[str], Any]) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = results(name)
    written = model.generate_batch(
        [IDS[0].tolist(), IDS[0, :7].tolist()],
        generation_config=GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=64),
    )
    model.set_attn_implementation("sdpa")
    alone = [model.generate(ids, **WRITING)[0, ids.shape[1] :].tolist() for ids in (IDS, IDS[:, :7])]
    assert [one.generated_tokens for one in written.values()] == alone


@pytest.mark.parametrize("name", ["no attention later", "sizes inside heads", "nemotron-nas", "gemma3"])
def test_continuous_batching_refuses_layers_with_other_caches(name: str, results: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match=r"Continuous batching of transformers has the same .*; use generate\(\)"):
        results(name).generate_batch([IDS[0].tolist()])


@pytest.mark.parametrize("name", ["low ranks", "nemotron-nas", "gemma3"])
def test_adapters_of_all_linears_merge(name: str, results: Callable[[str], Any]) -> None:
    """Every adapter is trained, also beside low ranks, and answers are the same after merging."""
    from peft import LoraConfig, get_peft_model

    model = deepcopy(results(name))
    assert all(
        module.weight.shape == (module.out_features, module.in_features)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    )
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False))
    adapted(IDS, labels=IDS).loss.backward()
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    assert len(trained) >= 2 * 7 * 2
    assert all(weight.grad is not None for weight in trained)
    expected = adapted.eval()(IDS).logits.detach()
    torch.testing.assert_close(adapted.merge_and_unload()(IDS).logits.detach(), expected, rtol=1e-3, atol=1e-3)


def test_results_of_older_names_open(results: Callable[[str], Any], tmp_path: Path) -> None:
    """Before linears of low rank were modules of their own, their tensors were named as whole ones are."""
    model = results("gemma3")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    older = {name.replace(".linear.", "."): tensor for name, tensor in tensors.items()}
    assert older.keys() != tensors.keys()
    save_file(older, tmp_path / "model.safetensors", {"format": "pt"})
    opened = load_model(tmp_path, device=torch.device("cpu"), dtype="auto")
    assert torch.equal(opened(IDS).logits, model(IDS).logits)


def test_the_config_states_what_differs_from_its_sizes_of_all_layers() -> None:
    """As transformers reads it: the first layer with attention has the sizes of all, and not the first layer."""
    stack = replace(SHAPE.stack(), layers=(replace(NO_ATTENTION, intermediate_size=0), LAYER, FEWER_HEADS, LAYER))
    config = json.loads(json.dumps(per_layer_config(CONFIG, SHAPE, stack)))
    assert [config[name] for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")] == [64, 4, 2]
    none = {"intermediate_size": 0, "num_attention_heads": 0, "num_key_value_heads": 0}
    assert config["per_layer_config"] == {"0": none, "2": {"num_attention_heads": 2, "num_key_value_heads": 1}}


@pytest.mark.parametrize("name", [*WITH_RANGES, "smoothed, positions", "nemotron-nas"])
@torch.no_grad()
def test_forward_passes_can_be_compiled_from_their_sources(name: str, results: Callable[[str], Any]) -> None:
    """As llm-compressor does to trace a model: outside the class, with the names of its file alone."""
    expected, model = results(name)(IDS).logits, deepcopy(results(name))
    for module in model.modules():
        source = inspect.unwrap(type(module).forward)
        if not source.__module__.startswith("oneshot."):
            continue  # transformers' and torch's own
        names = dict(source.__globals__)
        exec(textwrap.dedent(inspect.getsource(source)), names)
        module.forward = names["forward"].__get__(module)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=0)


def test_quantisers_trace_the_stock_forward_pass(results: Callable[[str], Any]) -> None:
    """They know what transformers' own does; what another would call is not compiled anew."""
    for name, stock in (("ranges", "LlamaModel"), ("smoothed, positions", "LlamaModel"), ("gemma3", "Gemma3TextModel")):
        assert inspect.unwrap(type(results(name).model).forward).__qualname__ == f"{stock}.forward"


@pytest.mark.parametrize("name", WITH_RANGES)
def test_ranges_open_where_a_quantiser_stated_a_tied_head(
    name: str, results: Callable[[str], Any], tmp_path: Path
) -> None:
    model = results(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    opened = load_model(tmp_path, device=torch.device("cpu"), dtype="auto")
    assert torch.equal(opened(IDS).logits, model(IDS).logits)
    opened.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(("name", "count"), [("smoothed", 12), ("smoothed, positions", 8)])
@torch.no_grad()
def test_scaling_the_pairs_for_smoothing_changes_no_answer(
    name: str, count: int, results: Callable[[str], Any]
) -> None:
    model, generator = deepcopy(results(name)).double(), torch.Generator().manual_seed(4)
    expected, pairs = model(IDS).logits, model.smoothing_pairs()
    assert len(pairs) == count
    for source, readers in pairs:
        scaled: Any = model.get_submodule(source)
        factors = torch.rand(len(scaled.weight), generator=generator, dtype=torch.float64) + 0.5
        for tensor in (scaled.weight, getattr(scaled, "bias", None)):
            if tensor is not None:
                tensor.div_(factors if tensor.ndim == 1 else factors.unsqueeze(1))
        for reader in readers:
            model.get_submodule(reader).weight.mul_(factors)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-9, atol=1e-9)


def test_the_stack_takes_its_arguments_by_place(results: Callable[[str], Any]) -> None:
    stack, mask = results("smoothed, positions").model, torch.ones_like(IDS)
    mask[:, :3] = 0
    named = stack(input_ids=IDS, attention_mask=mask).last_hidden_state
    assert torch.equal(stack(IDS, mask).last_hidden_state, named)
    assert torch.equal(stack(inputs_embeds=stack.embed_tokens(IDS), attention_mask=mask).last_hidden_state, named)
