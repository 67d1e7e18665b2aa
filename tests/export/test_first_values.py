"""Models that are made from a result's config alone: every tensor has a value, as in a stock class."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encoder_forms import form_config, shape_of
from factories import MakeCheckpoint, MakeResult, build_model
from safetensors.torch import load_file
from test_resized import RESIZED, ranked

from oneshot.checkpoint import with_floats
from oneshot.export import model_classes
from oneshot.export import modeling_oneshot_encoder as modelling

TOKENS = torch.arange(3, 33).view(2, 15)
RESULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the model, and of the run
    "ranks": ({"tied": True, "hidden": 48, "width": 128}, {"sparsity": 0.15}),
    "ranks of a head": ({"hidden": 48, "width": 128}, {"sparsity": 0.15}),
    "queries and keys": ({}, {"query_key_size": 4, "sparsity": 0.2}),
    "subspaces": ({"tied": True}, {"recipe": "group-pca", "group_size": 1, "hidden_size": 24}),
    "positions": ({"family": "opt"}, {"sparsity": 0.1}),
    "norms": ({"family": "qwen3", "tied": True}, {"sparsity": 0.1}),
    "nemotron-nas": ({"tied": True}, {"form": "nemotron-nas"}),
    "gemma": ({"family": "gemma3_text", "tied": True, "hidden": 48, "head_dim": 8}, {"sparsity": 0.3}),
    "encoder": ({"family": "bert", "model_class": "AutoModelForMaskedLM"}, {"sparsity": 0.1}),
    "encoder in subspaces": (
        {"family": "bert", "model_class": "AutoModelForMaskedLM", "tied": True},
        {"recipe": "group-pca", "group_size": 1, "hidden_size": 24},
    ),
}


@pytest.fixture(autouse=True)
def _memory_holds_no_numbers() -> Iterator[None]:
    """Let torch fill memory that nothing was written to, integers by the largest one."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_has_values(model: Any) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            assert tensor.isfinite().all(), name
            assert tensor.dim() == 1 or tensor.std() < 0.5, name
        else:
            assert tensor.min() >= 0, name
            assert tensor.max() < 1000, name
    with torch.inference_mode():
        assert model.eval()(TOKENS).logits.isfinite().all()


@pytest.fixture(params=RESULTS)
def result(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint, make_result: MakeResult) -> Path:
    model, run = RESULTS[request.param]
    torch.use_deterministic_algorithms(False)
    folder = make_result(make_checkpoint(**model), **{"form": "per-layer"} | run)
    torch.use_deterministic_algorithms(True)
    return folder


def auto_class(folder: Path) -> tuple[Any, Any]:
    """Return the config of a result, and the auto class that opens the result."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    name = next(name for name, own in config.auto_map.items() if own.endswith(f".{config.architectures[0]}"))
    return config, getattr(transformers, name)


def test_a_config_alone_gives_a_model(result: Path, tmp_path: Path) -> None:
    """It computes numbers, and is saved and opened as any other."""
    config, auto = auto_class(result)
    model = auto.from_config(config, trust_remote_code=True)
    assert_has_values(model)
    assert model.state_dict().keys() == auto.from_pretrained(result, trust_remote_code=True).state_dict().keys()
    model.save_pretrained(tmp_path / "made")
    again = auto.from_pretrained(tmp_path / "made", trust_remote_code=True).eval()
    with torch.inference_mode():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_what_no_file_holds_has_values(result: Path) -> None:
    config, auto = auto_class(result)
    opened = auto.from_pretrained(result, trust_remote_code=True)
    assert_has_values(type(opened).from_pretrained(None, config=config, state_dict={}))


def test_what_a_file_holds_stays(result: Path) -> None:
    """Opening draws no numbers either."""
    _, auto = auto_class(result)
    torch.manual_seed(5)
    opened = auto.from_pretrained(result, trust_remote_code=True).state_dict()
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    stored = load_file(result / "model.safetensors")
    assert all(torch.equal(opened[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("name", RESIZED)
def test_a_config_of_any_stock_class_gives_a_model(name: str, make_checkpoint: MakeCheckpoint) -> None:
    """Ranks, ranges of the vocabulary and experts are made after the stock class has given its values."""
    config, _ = ranked(make_checkpoint(**RESIZED[name]))
    config_class, model_class = model_classes(config)
    model = model_class._from_config(config_class.from_dict(with_floats(config)))
    assert_has_values(model)
    wanted = getattr(model.config, "initializer_range", None) or 0.02
    for part, module in model.named_modules():
        if type(module).__name__ in ("Linear", "OneshotTable", "OneshotCoordinates") and module.weight.numel() > 200:
            assert 0.4 < float(module.weight.std()) / wanted < 1.3, part  # GPT-2 divides by the layers


def test_encoders_without_heads_or_neurons_have_values() -> None:
    """Only the biases of the linears that nothing enters are left."""
    stock = build_model("bert", model_class="AutoModelForMaskedLM")
    shapes = [shape_of(stock, num_attention_heads=0), shape_of(stock, intermediate_size=0)]
    config = modelling.OneshotEncoderConfig.from_dict(form_config(stock, shapes, subspaces=False))
    for model in (
        modelling.OneshotEncoderForMaskedLM._from_config(config),
        modelling.OneshotEncoderForMaskedLM.from_pretrained(None, config=config, state_dict={}),
    ):
        assert sum(isinstance(module, modelling.OneshotConstant) for module in model.modules()) == 2
        assert_has_values(model)
