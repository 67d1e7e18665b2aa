"""What families say about themselves, against the stock classes."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from factories import build_model, stored_numbers
from families.cases import CASES, variants
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from oneshot.architecture import (
    Attention,
    Description,
    Experts,
    Feature,
    ModelShape,
    Stack,
    check_layers,
    fuse,
    read_shape,
)
from oneshot.checkpoint import resized_config, stock_config
from oneshot.errors import CheckpointError
from oneshot.families import FAMILIES, LLAMA, find_family

VARIANTS = variants()


def read(variant: str) -> tuple[Any, dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return a tiny stock model, its config.json and the shapes of its stored tensors."""
    model = build_model(**VARIANTS[variant])
    stored = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    renamed = FAMILIES[model.config.model_type].renamed
    stored = {renamed.get(name, name): shape for name, shape in stored.items()}
    if model.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    return model, model.config.to_dict(), stored


def of_the_class(family: Description, shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer as the stock class has them, which has some linears as one."""
    with torch.device("meta"):
        own = {name: torch.empty(size) for name, size in family.expected_tensors(shape, layer).items()}
        return {name: tuple(tensor.shape) for name, tensor in fuse(own, family.stack_of(layer)).items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_expected_tensors_equal_the_layers_state_dict(variant: str) -> None:
    model, config, stored = read(variant)
    family = find_family(config)
    shape = read_shape(family, config, stored)
    check_layers(family, shape, stored)
    for number, layer in enumerate(model.get_submodule(family.stack.layers)):
        expected = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        assert of_the_class(family, shape, number) == expected


@pytest.mark.parametrize("name", [name for name in CASES if FAMILIES[name].sizes.num_experts and name in VARIANTS])
def test_the_number_of_experts_under_every_name_that_the_class_reads(name: str) -> None:
    """A config may state a name beside the class's own one, and the class then reads the other name."""
    model, config, stored = read(name)
    family = find_family(config)
    shape = read_shape(family, config, stored)
    assert shape.experts is not None
    fewer = replace(shape, experts=replace(shape.experts, count=3))
    names = {alias: own for alias, own in model.config.attribute_map.items() if own in family.sizes.num_experts}
    own = next((own for own in (*names.values(), *family.sizes.num_experts) if own in config), None)
    assert own is not None
    silent = {key: value for key, value in config.items() if key not in (*names, *names.values())}
    for stated in (config, silent, *(config | {alias: 4} for alias in names)):
        assert getattr(stock_config(resized_config(family, stated, fewer)), own) == 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_counted_parameters_equal_the_models(variant: str) -> None:
    model, config, stored = read(variant)
    shape = read_shape(find_family(config), config, stored)
    for number, layer in enumerate(model.get_submodule(find_family(config).stack.layers)):
        assert shape.layer(number).parameters() == sum(tensor.numel() for tensor in layer.state_dict().values())
    assert shape.stack().stored_parameters() == stored_numbers(model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_name_of_a_description_exists_in_the_stock_class(variant: str) -> None:
    model, config, _ = read(variant)
    family = find_family(config)
    stack, names = family.stack, dict(model.named_parameters(remove_duplicate=False))
    assert len(names[stack.embedding]) == 400
    assert family.head is not None
    assert len(names[family.head]) == 400
    assert (stack.positions in names) == (stack.positions is not None)
    assert stack.final_norm is not None
    model.get_submodule(stack.final_norm.name)
    for number, layer in enumerate(model.get_submodule(stack.layers)):
        check_names(family.stack_of(number), layer)


def check_names(stack: Stack, layer: Any) -> None:
    if isinstance(stack.token_mixer, Attention):
        layer.get_submodule(stack.token_mixer.module)
    if stack.experts is None:
        assert callable(stack.ffn.activation) or layer.get_submodule(stack.ffn.activation)
    else:
        weight = layer.get_submodule(stack.experts.router).weight
        assert len(weight) == len(layer.get_submodule(stack.experts.experts).down_proj) in (4, 6)
    for sublayer in stack.sublayers:
        for norm in sublayer.norms:
            assert {f"{norm.name}.{part}" for part, _ in layer.get_submodule(norm.name).named_parameters()} == {
                *norm.parts
            }
        for linear in () if isinstance(sublayer.mixer, Experts) else (*sublayer.readers, sublayer.writer):
            assert isinstance(layer.get_submodule(stack.stored_linear(linear)), (torch.nn.Linear, Conv1D))


@pytest.mark.parametrize(
    "name",
    [name for name, one in FAMILIES.items() if one.like_llama and one.reason_against("per-layer form") is None],
)
def test_renaming_there_and_back_changes_nothing(name: str) -> None:
    family = FAMILIES[name]
    stack = family.stack
    shape = ModelShape(
        num_hidden_layers=1,
        hidden_size=8,
        intermediate_size=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=2,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        query_key_norms=stack.attention.q_norm is not None,
        layer_norms=stack.centres,
        norm_bias=stack.centres,
        gated=stack.ffn.gate is not None,
    )
    extra = [f"{sublayer.shortcut}.weight" for sublayer in stack.sublayers] + [stack.attention.rotary_pairs]
    names = [*family.expected_tensors(shape), *extra]
    tensors = {name: torch.tensor(number) for number, name in enumerate(names)}
    renamed = family.rename(tensors, LLAMA)
    assert len(renamed) == len(tensors)
    back = LLAMA.rename(renamed, family)
    assert list(back) == names
    assert all(back[name] is tensor for name, tensor in tensors.items())
    ours, theirs = stack, LLAMA.stack
    pairs = [(ours.attention.out, theirs.attention.out), (ours.ffn.up, theirs.ffn.up), (ours.ffn.down, theirs.ffn.down)]
    pairs += [(first.norm.name, other.norm.name) for first, other in zip(ours.sublayers, theirs.sublayers, strict=True)]
    for own, llamas in pairs:
        assert renamed[f"{llamas}.weight"] is tensors[f"{own}.weight"]


def test_every_family_is_in_the_table_of_tests() -> None:
    assert CASES.keys() | {"mt5"} == FAMILIES.keys(), "MT5 is T5 under another name"


@pytest.mark.parametrize("name", CASES)
def test_families_refuse_features_with_a_remedy(name: str) -> None:
    features: tuple[Feature, ...] = get_args(Feature)
    reasons = {feature: FAMILIES[name].reason_against(feature) for feature in features}
    refused = {feature: reason for feature, reason in reasons.items() if reason is not None}
    of_mixtures = {"experts"} if FAMILIES[name].stack.experts is None else set()
    assert refused.keys() == CASES[name].refused | of_mixtures
    assert all("--" in reason or "profile" in reason for reason in refused.values())


DENSE = {"hidden_size_per_layer_input": 0}
SHARED = {"num_kv_shared_layers": 2}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma4_text", DENSE | SHARED, "share keys and values .* and no embedding of the token in every layer"),
        ("gemma4_text", {"enable_moe_block": True}, "experts and an embedding of the token in every layer"),
        ("gemma4_text", {"vocab_size_per_layer_input": 9}, "for 9 tokens of 262144 alone"),
        ("gemma4_text", DENSE | {"use_bidirectional_attention": "all"}, "attends in both directions"),
        (
            "gemma4",
            {"text_config": {"model_type": "gemma4_text", "enable_moe_block": True}},
            "experts and an embedding",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends in both directions"),
    ],
)
def test_variants_that_are_not_described_are_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        find_family(AutoConfig.for_model(name).to_dict() | changes)
