"""Tensors that a class keeps in another dtype than it is loaded in: the stream has each as the stock class has it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import cpu_machine
from families.cases import CASES, Case

from oneshot.architecture import Experts
from oneshot.checkpoint import open_model, sample_model
from oneshot.families import FAMILIES
from oneshot.stream import LayerBuilder, check_family
from oneshot.stream.memory import memory_of
from oneshot.text import Text

TOKEN_IDS = torch.randint(4, 400, (2, 24), generator=torch.Generator().manual_seed(1))
BIASES = ("e_score_correction_bias", "expert_bias")
OFFSETS = (7.0, 34.5)  # of biases in published models; each in a layer of its own


def mixtures() -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """Yield the families of the table that have experts, with options of such a variant."""
    for name, case in CASES.items():
        if name == "qwen3_5_moe" or any("experts" in key for key in case.options):
            yield name, case, case.options
        if "experts" in case.variants:
            yield f"{name}-experts", case, case.options | case.variants["experts"]


KEEPERS = [  # beside mixtures; what the class keeps depends on the dtype
    *((name, torch.bfloat16) for name in ("gpt_bigcode", "lfm2", "falcon_h1", "qwen3_5_text", "gemma4_text")),
    *((name, torch.float16) for name in ("gpt_oss", "t5")),
]
MIXTURES = {name: (case, options) for name, case, options in mixtures() if name != "granitemoehybrid"}


def dtypes(model: Any) -> dict[str, torch.dtype]:
    return {name: one.dtype for name, one in [*model.state_dict().items(), *model.named_buffers()]}


def assert_kept(config: dict[str, Any], loaded: Any, dtype: torch.dtype) -> None:
    """Assert that a sample has every tensor in the dtype in which the stock class was loaded."""
    family = FAMILIES[config["model_type"]].described_by(config)
    ours = dtypes(sample_model(config, family, dtype, range(loaded.config.get_text_config().num_hidden_layers)))
    stock = dtypes(loaded)
    assert {name: ours[name] for name in stock} == stock


@pytest.mark.parametrize(("name", "dtype"), KEEPERS)
def test_every_tensor_has_the_dtype_of_the_loaded_class(name: str, dtype: torch.dtype) -> None:
    built = CASES[name].build(**CASES[name].options)
    config = built.config.to_dict() | {"architectures": [type(built).__name__]}
    weights = {name: one.to("meta") for name, one in built.state_dict().items()}
    loaded = type(built).from_pretrained(None, config=built.config, state_dict=weights, dtype=dtype, device_map="meta")
    assert_kept(config, loaded, dtype)


@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_tokens_go_to_the_experts_of_the_stock_class(name: str, tmp_path: Path) -> None:
    """In bfloat16, from float32 files whose numbers bfloat16 cannot hold, with biases at published offsets."""
    case, options = MIXTURES[name]
    built = case.build(**options)
    biases = [tensor for key, tensor in built.state_dict().items() if key.endswith(BIASES)]
    for bias, offset in zip(biases, OFFSETS, strict=bool(biases)):
        bias += offset - bias.mean()
    built.save_pretrained(tmp_path / "model")
    stock = type(built).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    model, machine = open_model(str(tmp_path / "model"), tmp_path), cpu_machine(tmp_path, dtype=torch.bfloat16)
    check_family(model, machine)
    assert_kept(model.checkpoint.config, stock, torch.bfloat16)

    read: dict[int, torch.Tensor] = {}
    told: dict[int, list[torch.Tensor]] = {}

    def listen(number: int, module: Any, experts: Experts) -> None:
        module.register_forward_pre_hook(lambda _, unnamed: read.update({number: unnamed[0]}))
        module.get_submodule(experts.experts).register_forward_hook(
            lambda _, unnamed, named, __: told.update({number: [*unnamed, *named.values()]}), with_kwargs=True
        )

    mixtures = {
        number: experts
        for number in range(model.shape.num_hidden_layers)
        if (experts := model.family.stack_of(number).experts) is not None
    }
    for number, experts in mixtures.items():
        listen(number, stock.get_submodule(model.family.stack.layers)[number], experts)
    stock(input_ids=TOKEN_IDS, use_cache=False)
    builder = LayerBuilder(model, machine, TOKEN_IDS.shape[1])
    memory = memory_of(model, machine, Text(TOKEN_IDS, "a test").batches(len(TOKEN_IDS)))
    assert mixtures
    for number, experts in mixtures.items():
        layer, x = builder.layer(number, model.read_layer(number), memory), read[number]
        for key, tensor in stock.get_submodule(model.family.stack.layers)[number].state_dict().items():
            torch.testing.assert_close(layer.tensor(key), tensor, rtol=0, atol=0)
        mixers = [sublayer.mixer for sublayer in model.family.stack_of(number).sublayers]
        for index in range(mixers.index(experts)):
            x = layer.run(index, x)
        [theirs] = [one for one in told[number] if one.dtype == torch.int64]
        assert torch.equal(layer.route(mixers.index(experts), x).chosen.sort(-1).values, theirs.sort(-1).values)
