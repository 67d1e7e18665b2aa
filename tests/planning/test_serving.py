"""Sizes that `--serve` asks for, against the linears that GPUs would share; what no size can obey is refused first."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from oneshot.architecture import RANKED_KINDS, ExpertSizes, ModelShape
from oneshot.config import Config, Target
from oneshot.errors import ConfigError, OneshotError, PlanError
from oneshot.export.modeling_oneshot import OneshotConfig, OneshotForCausalLM
from oneshot.export.per_layer import PerLayerForm, per_layer_config
from oneshot.export.stock import StockForm
from oneshot.families import LLAMA
from oneshot.planning import Damages, Grid, Plan, expert_counts, make_plan, quantiser_groups, with_steps
from oneshot.planning.serving import MisfitError
from oneshot.recipes import find_recipe
from oneshot.serving import Serving

HIDDEN, HEADS, GROUPS, HEAD = 512, 8, 4, 64
CONFIG: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
CONFIG |= {"vocab_size": 80, "hidden_size": HIDDEN, "intermediate_size": 768, "num_hidden_layers": 2, "head_dim": HEAD}
CONFIG |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "bos_token_id": 0, "pad_token_id": 1}


def shape_with(**sizes: int) -> ModelShape:
    stated = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "intermediate_size": 768, "num_attention_heads": HEADS}
    return ModelShape(**stated | {"num_key_value_heads": GROUPS, "head_dim": HEAD} | sizes, vocab_size=80, tied=True)


def grid_for(serve: str, form: Any = None, **sizes: int) -> Grid:
    shape = shape_with(**sizes)
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=HEAD)
    checkpoint = SimpleNamespace(config=config.to_dict())
    model: Any = SimpleNamespace(family=LLAMA, shape=shape, checkpoint=checkpoint)
    grid: Grid = (form or PerLayerForm()).grid(model)
    return replace(grid, serving=Serving.of(serve))


def random_damages(shape: ModelShape, seed: int) -> Damages:
    """Return losses of a profile that fall with every size."""
    generator = torch.Generator().manual_seed(seed)

    def curves(*sizes: int) -> torch.Tensor:
        falling = torch.rand(*sizes, generator=generator, dtype=torch.float64).sort(-1, descending=True).values
        falling[..., -1] = 0
        return falling

    layers, units = shape.num_hidden_layers, max(shape.num_key_value_heads, shape.heads_per_group)
    return {
        "query_key_size": curves(layers, shape.head_dim + 1),
        "value_size": curves(layers, shape.head_dim + 1),
        "ffn": curves(layers, shape.intermediate_size + 1),
        "heads": curves(layers, units + 1),
        "layers": torch.ones(layers),
        "embedding": curves(8, shape.hidden_size + 1).unsqueeze(0),
        **{f"{kind}_rank": curves(layers, shape.hidden_size + 1) for kind in RANKED_KINDS},
    }


def refuse_shares(grid: Grid, plan: Plan, tp: int, group: int) -> None:
    """Fail if GPUs cannot share a linear of the class that opens the result, or have no whole groups of its inputs."""
    sizes = {"intermediate_size": grid.shape.intermediate_size}
    config = OneshotConfig.from_dict(per_layer_config(CONFIG | sizes, grid.shape, grid.stack(plan)))
    with torch.device("meta"):
        layers = OneshotForCausalLM(config).model.layers
    shared = 0
    for name, linear in layers.named_modules():
        if isinstance(linear, nn.Linear):
            writes = any(part in name for part in ("o_proj", "down_proj"))
            shared += writes
            assert linear.in_features % (tp * group if writes else group) == 0, name
            assert writes or linear.out_features % tp == 0, name
    assert shared == 2 * len(layers)
    for layer in config.layers:
        assert layer["num_attention_heads"] % tp == 0
        assert layer["num_key_value_heads"] % tp == 0 or tp % layer["num_key_value_heads"] == 0


@pytest.mark.parametrize(
    ("serve", "method", "sizes"),
    [
        ("tp=2,group=128", {}, {}),
        ("tp=4", {}, {}),
        ("tp=3", {"heads": "id", "head_unit": "query-head"}, {"heads_of_all": 12}),
        ("tp=2,group=32", {"heads": "id", "head_unit": "kv-group"}, {}),
        ("tp=2,group=64", {"ranks": "none"}, {"intermediate_size": 800}),
        ("group=128", {}, {"intermediate_size": 1000}),
        ("tp=8", {}, {}),
        ("tp=2", {"inner_sizes": "sensitivity", "ranks": "none"}, {}),
        ("tp=2,group=16", {}, {"round_to": 24}),
    ],
    ids=str,
)
def test_sizes_that_are_planned_can_be_shared(serve: str, method: dict[str, Any], sizes: dict[str, int]) -> None:
    round_to = {name: sizes[name] for name in ("round_to",) if name in sizes}
    stated = {name: size for name, size in sizes.items() if name not in ("round_to", "heads_of_all")}
    if heads := sizes.get("heads_of_all"):
        stated |= {"num_attention_heads": heads, "num_key_value_heads": 3}
    grid = grid_for(serve, **stated)
    target = with_steps(Target(sparsity=0.25, serve=serve, **round_to), grid.shape, 1)
    settled, serving = grid.settle(find_recipe("oneshot", **method), target), grid.serving
    first = make_plan(grid, settled, target)
    for seed in range(2):
        plan = make_plan(grid, settled, target, random_damages(grid.shape, seed))
        refuse_shares(grid, plan, serving.tp, serving.group)
        ratio = grid.stack(plan).stored_parameters() / grid.shape.stack().stored_parameters()
        assert ratio <= 0.76
    if serving.group > 1:
        assert quantiser_groups(grid, settled, first, target, by_profile=True).kept % serving.group == 0
    assert all(width % target.round_to == 0 for width in (kept.intermediate_size for kept in plan.layers))


@pytest.mark.parametrize(
    ("serve", "sizes", "method", "sentence"),
    [
        (
            "group=128",
            {"hidden_size": 576},
            {},
            "has 576 inputs, which groups of 128 do not divide; give --serve group=64",
        ),
        (
            "tp=2",
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            {},
            "9 heads, which 2 GPUs cannot share equally; leave --serve out, or allow --set heads=id --set "
            "head_unit=kv-group.",
        ),
        ("tp=7", {}, {}, "8 heads, which 7 GPUs cannot share equally; give --serve tp=4."),
        ("tp=6", {"num_attention_heads": 12}, {}, "4 KV heads, which 6 GPUs cannot share equally; give --serve tp=4"),
        ("pp=3", {}, {}, "2 layers stay, which 3 stages of a pipeline cannot share; give --serve a smaller pp."),
        (
            "pp=3",
            {"further_parameters": 10**9},
            {},
            "2 layers stay, which 3 stages of a pipeline cannot share; give --serve a smaller pp.",
        ),
        (
            "tp=2,group=512",
            {},
            {"ranks": "none"},
            "a FFN width in multiples of 1024, which is above the 768 of this model",
        ),
        (
            "tp=2,group=384",
            {},
            {"ranks": "none"},
            "has 512 inputs, which groups of 384 do not divide; give --serve tp=2,group=128.",
        ),
        ("tp=999999", {}, {}, "which is above the 768 of this model; give fewer"),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", [PerLayerForm(), StockForm()], ids=["per-layer", "stock"])
def test_what_no_size_can_obey_is_told_before_any_work(
    form: Any, serve: str, sizes: dict[str, int], method: dict[str, Any], sentence: str
) -> None:
    grid = grid_for(serve, form, **sizes)
    target = with_steps(Target(sparsity=0.25, serve=serve), grid.shape, 1)
    with pytest.raises(PlanError) as caught:
        make_plan(grid, grid.settle(find_recipe("oneshot", **method), target), target)
    assert isinstance(caught.value, MisfitError) == (not serve.startswith("pp="))  # other heads mend no stages
    assert sentence in str(caught.value)


def test_the_advice_of_a_refusal_helps() -> None:
    grid = grid_for("tp=2", num_attention_heads=9, num_key_value_heads=3)
    target = with_steps(Target(sparsity=0.25, serve="tp=2"), grid.shape, 1)
    method = grid.settle(find_recipe("oneshot", heads="id", head_unit="kv-group"), target)
    for damages in (None, random_damages(grid.shape, 0)):
        plan = make_plan(grid, method, target, damages)
        assert {layer.num_key_value_heads for layer in plan.layers} == {2}


def test_gpus_share_every_number_of_experts_that_a_layer_keeps_if_they_share_all() -> None:
    assert expert_counts(ExpertSizes(12, 3), 4) == [4, 8, 12]
    assert expert_counts(ExpertSizes(10, 7), 4) == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("serve", "named"),
    [
        ("tp=0", "tp=0 is not a positive integer"),
        ("tp=two", "tp=two is not a positive integer"),
        ({"tp": True}, "tp=True is not a positive integer"),
        ({"group": 2.5}, "group=2.5 is not a positive integer"),
        ("tp=" + "1" * 5000, "is not a positive integer"),
        ("tpp=2", "tpp is not understood; write engine=vllm,tp=2,pp=1,group=128; did you mean tp?"),
        ("tp", "tp is not understood"),
        ("", "--serve  is not understood"),
        ({}, "--serve is empty"),
        ("tp=2,tp=2", "gives tp twice"),
        ("engine=vlm", "engine=vlm is not one of vllm, sglang, trtllm, mlx, llama.cpp; did you mean vllm?"),
        ("engine=llama.cpp,tp=2", "leave tp= and pp= out"),
        (3, "is of the type int; give a text"),
    ],
    ids=str,
)
def test_a_request_that_is_not_understood_is_refused(serve: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.of("model", "out", sparsity=0.2, serve=serve)
    assert named in str(caught.value)


def test_a_mapping_and_a_text_are_one_request() -> None:
    written = Config.of("model", "out", sparsity=0.2, serve=" group=128, engine=vllm ,tp=2,pp=1")
    assert written == Config.of("model", "out", sparsity=0.2, serve={"engine": "vllm", "tp": 2, "group": 128})
    assert written.target.serve == "engine=vllm,tp=2,group=128"
    assert isinstance(ConfigError(), OneshotError)
