"""Which dimension of which tensor is the stream, neurons, heads, groups or experts: the stock classes are the witness.

Every family is built a second time with other sizes, no two alike, and once more as its stock config states
smaller ones. A dimension that is taken for another one does not grow and shrink as the stock class's.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from factories import build_model
from families.cases import CASES, Case
from t5_models import build_t5

from oneshot.architecture import Description, ModelShape, fuse, read_shape
from oneshot.checkpoint.stock import complete_text_config, resized_config
from oneshot.export.companions import empty_model
from oneshot.families import find_family

OTHER_SIZES = {"hidden": 96, "heads": 6, "width": 56}
# of what only some families state
FURTHER_SIZES = {
    "head_dim": 10,
    "num_experts": 10,
    "num_local_experts": 10,
    "n_routed_experts": 10,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
    "shared_intermediate_size": 72,
}
VARIANTS = {
    f"{name}-{variant}".rstrip("-"): (case, case.options | further)
    for name, case in CASES.items()
    for variant, further in {"": {}, **case.variants}.items()
} | {"t5-gated": (CASES["t5"], {"gated": True, "tied": False})}


def build(case: Case, options: dict[str, Any]) -> Any:
    """Return the stock model with other sizes than the case's."""
    if case.build is build_t5:
        return build_t5(**options, width=56, d_model=96, num_heads=6, d_kv=10)
    if case.build is not build_model:
        names = {"hidden_size": 96, "intermediate_size": 56, "num_attention_heads": 6, "num_key_value_heads": 3}
        return case.build(**options, **names)
    sizes = OTHER_SIZES | {name: size for name, size in FURTHER_SIZES.items() if options.get(name)}
    if options.get("family") == "helium":  # whose class has heads as wide as its hidden size
        sizes["head_dim"] = 96 // 6
    groups = {1: 1, 2: 3, 4: 6}[options.get("groups", 2)]
    return build_model(**options | sizes | {"groups": groups})


def assert_sizes(family: Description, shape: ModelShape, model: Any) -> None:
    """Check every tensor of every layer, and the count of parameters."""
    number = 0
    for stack in family.stacks:
        for layer in model.get_submodule(stack.layers):
            expected = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
            with torch.device("meta"):
                own = {name: torch.empty(size) for name, size in family.expected_tensors(shape, number).items()}
            stored = fuse(own, family.stack_of(number))
            assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected
            parameters = sum(tensor.numel() for tensor in layer.state_dict().values())
            assert shape.layer(number).parameters() == parameters
            number += 1
    assert number == shape.num_hidden_layers


def smaller(family: Description, shape: ModelShape) -> ModelShape:
    """Return smaller sizes as far as a stock config states them: neurons, heads, KV groups, experts, the stream."""
    smaller = replace(shape, intermediate_size=24)
    if family.reason_against("heads") is None:
        alike = shape.num_attention_heads == shape.num_key_value_heads
        groups = 4 if alike else min(2, shape.num_key_value_heads)
        smaller = replace(smaller, num_attention_heads=4, num_key_value_heads=groups)
    if shape.experts is not None and family.reason_against("experts") is None:
        smaller = replace(smaller, experts=replace(shape.experts, count=7))
    if family.reason_against("hidden size") is None and not shape.layer_norms:
        smaller = replace(smaller, hidden_size=64)
    return replace(smaller, head_dim=7) if family.free_head_size else smaller


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_dimension_of_every_tensor_follows_the_sizes_of_the_stock_class(variant: str) -> None:
    model = build(*VARIANTS[variant])
    config, stored = model.config.to_dict(), {name: tuple(one.shape) for name, one in model.state_dict().items()}
    family = find_family(config)
    if model.config.tie_word_embeddings and family.head is not None:
        del stored[family.head]
    shape = read_shape(family, complete_text_config(family, config), stored)
    family = family.numbered(shape)
    assert_sizes(family, shape, model)
    resized = smaller(family, shape)
    assert_sizes(family, resized, empty_model(resized_config(family, config, resized)))
