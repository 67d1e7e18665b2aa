"""Operations of the layers, against the operations that torch counts while a stock model runs."""

import pytest
import torch
from factories import build_model
from torch.utils.flop_counter import FlopCounterMode

from oneshot.architecture import read_shape
from oneshot.families import find_family


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
