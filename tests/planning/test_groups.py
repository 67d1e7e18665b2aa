"""What a dry run says of groups of quantisers, against the linears of the models that it may come to."""

from math import gcd
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from oneshot.architecture import RANKED_KINDS, ModelShape
from oneshot.config import Target
from oneshot.export.modeling_oneshot import OneshotConfig, OneshotForCausalLM
from oneshot.export.per_layer import PerLayerForm, per_layer_config
from oneshot.families import LLAMA
from oneshot.planning import Damages, Plan, make_plan, quantiser_groups
from oneshot.planning.groups import GROUPS
from oneshot.recipes import find_recipe

SHAPE = ModelShape(3, 512, 768, 8, 4, 64, vocab_size=80, tied=True)
CONFIG: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
CONFIG |= {"vocab_size": 80, "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3, "head_dim": 64}
CONFIG |= {"num_attention_heads": 8, "num_key_value_heads": 4, "bos_token_id": 0, "pad_token_id": 1}


def random_damages(seed: int) -> Damages:
    """Return losses of a profile that fall with every size."""
    generator = torch.Generator().manual_seed(seed)

    def curves(*sizes: int) -> torch.Tensor:
        falling = torch.rand(*sizes, generator=generator, dtype=torch.float64).sort(-1, descending=True).values
        falling[..., -1] = 0
        return falling

    sizes = {"query_key_size": 65, "value_size": 65, "ffn": 769, "heads": 5}
    sizes |= {f"{kind}_rank": 513 for kind in RANKED_KINDS}
    of_layers = {name: curves(3, size) for name, size in sizes.items()}
    return of_layers | {"layers": torch.ones(3), "embedding": curves(8, 513).unsqueeze(0)}


def inputs(grid: Any, plan: Plan) -> set[int]:
    """Return the inputs of every linear in the layers of the class that opens a result."""
    config = OneshotConfig.from_dict(per_layer_config(CONFIG, SHAPE, grid.stack(plan)))
    with torch.device("meta"):
        layers = OneshotForCausalLM(config).model.layers
    return {linear.in_features for linear in layers.modules() if isinstance(linear, nn.Linear)}


@pytest.mark.parametrize(
    ("recipe", "method", "sizes", "said"),
    [
        ("oneshot", {}, {}, "32; --round-to 128 for 64 and 128"),
        ("oneshot", {}, {"round_to": 128}, "32 and 64 and 128"),
        ("oneshot", {}, {"round_to": 48}, "none of 32, 64, 128; --round-to 128 for 32 and 64 and 128"),
        ("oneshot", {"heads": "id", "ranks": "none"}, {}, "32; --round-to 128 for 64 and 128"),
        ("oneshot", {"heads": "id", "head_unit": "query-head"}, {}, "32; --round-to 128 for 64 and 128"),
        ("oneshot", {"inner_sizes": "sensitivity", "ranks": "none"}, {}, "32"),
        ("oneshot", {"ranks": "none"}, {"value_size": 36}, "32"),
        ("oneshot", {"ranks": "none"}, {"value_size": 34}, "none of 32, 64, 128"),
        ("tcsp", {}, {"round_to": 32, "sparsity": 0.3}, "32; --round-to 128 for 64 and 128"),
        ("oneshot", {}, {"sparsity": None, "intermediate_size": 480}, "32"),
    ],
)
def test_groups_that_are_said_divide_all_inputs(
    recipe: str, method: dict[str, Any], sizes: dict[str, Any], said: str
) -> None:
    model: Any = SimpleNamespace(family=LLAMA, shape=SHAPE)
    grid, target = PerLayerForm().grid(model), Target(**{"sparsity": 0.25} | sizes)
    settled = grid.settle(find_recipe(recipe, **method), target)
    by_profile = settled.allocation == "sensitivity" and target.sparsity is not None
    plan = make_plan(grid, settled, target)
    groups = quantiser_groups(grid, settled, plan, target, by_profile=by_profile)
    assert str(groups) == said
    if not by_profile:
        assert groups.kept == gcd(*inputs(grid, plan))
        return
    for seed in range(3):
        final = make_plan(grid, settled, target, random_damages(seed))
        assert gcd(*inputs(grid, final)) % groups.kept == 0
    if more := [group for group in GROUPS if f"--round-to {group}" in said]:
        rounded = Target(sparsity=0.25, round_to=more[0])
        assert gcd(*inputs(grid, make_plan(grid, settled, rounded, random_damages(0)))) % more[0] == 0
