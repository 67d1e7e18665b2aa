"""Operations of the layers, against the operations that torch counts while a stock model runs."""

from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model
from families.cases import variants
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from oneshot.architecture import read_shape
from oneshot.families import find_family
from oneshot.pipeline import compress


@pytest.mark.parametrize(
    ("family", "length"), [("llama", 24), ("llama", 5), ("qwen3", 16), ("opt", 24)], ids=lambda value: str(value)
)
def test_operations_are_those_that_torch_counts(family: str, length: int) -> None:
    model = build_model(family, layers=3)
    model.set_attn_implementation("eager")  # whose products are over all pairs of positions
    counter = FlopCounterMode(display=False)
    with counter, torch.inference_mode():
        model(torch.arange(length).unsqueeze(0), use_cache=False)
    head = 2 * model.lm_head.weight.numel() * length
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    stack = read_shape(find_family(config), config, names).stack()
    biases = sum(tensor.numel() for name, tensor in model.named_parameters() if ".layers." in name and "bias" in name)
    norms = sum(
        tensor.numel()
        for name, tensor in model.named_parameters()
        if ".layers." in name and "norm" in name and name.endswith("bias")
    )
    # torch counts no additions of biases
    expected = stack.layer_flops_per_token(length) - 2 * (biases - norms)
    products = counter.get_total_flops() - head
    assert products / length == pytest.approx(expected, rel=1e-3)  # torch also counts the angles of the positions


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-one-kv-head", {"form": "per-layer", "sparsity": 0.4}),  # tied tables of several ranks
        ("llama-one-kv-head", {"form": "per-layer", "hidden": "pca", "hidden_rate": 0.3}),
        ("llama", {"form": "per-layer", "sparsity": 0.2, "keep": ["layers.*"]}),  # two tables of several ranks
        ("mixtral", {"form": "per-layer", "experts": "effects", "sparsity": 0.3, "embedding": "none"}),
        ("deepseek_v2", {}),
        ("lfm2", {}),
        ("falcon", {"form": "per-layer"}),
    ],
    ids=str,
)
@torch.inference_mode()
def test_a_report_counts_the_linears_and_the_cache_of_the_result(
    name: str, options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(**variants()[name]), **options)
    report = compress(config)
    assert report.plan["embedding"] or name != "llama-one-kv-head" or "hidden" in options
    assert report.plan["output_head"] or "keep" not in options
    for which, folder in (("dense", config.checkpoint), ("compressed", config.output)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation="eager")
        model.set_experts_implementation("eager")  # grouped products are not counted
        operations, numbers = {}, {}
        for length in (16, 32):
            ids = torch.arange(3, 3 + length).unsqueeze(0)
            with FlopCounterMode(display=False) as counter:
                output = model(ids, use_cache=True)
            operations[length] = counter.get_total_flops()
            cache = output.cache if "cache" in output else output.past_key_values
            of_layers = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
            numbers[length] = sum(part.numel() for part in of_layers if part is not None)
        linears = (4 * operations[16] - operations[32]) / 32  # products of attention grow with the square
        assert report.flops_per_token[which] == pytest.approx(linears, rel=2e-3)  # torch also counts angles
        assert report.kv_bytes_per_token[which] == 2 * (numbers[32] - numbers[16]) / 16
