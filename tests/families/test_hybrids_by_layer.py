"""Hybrids whose layers have sizes of their own: their profiles, their seconds, and results without whole layers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import (
    MakeCheckpoint,
    MakeConfig,
    assert_cache_changes_nothing,
    build_model,
    cpu_machine,
    profiled_tokens,
)
from families.cases import CASES
from last_states import assert_passes, keep_last_states
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from oneshot.checkpoint import open_model
from oneshot.errors import PlanError
from oneshot.evaluation import load_model
from oneshot.pipeline import compress, profile
from oneshot.profiling import measured_seconds

# writers of a family's mixers, by the module that holds each
WRITERS = {
    "falcon_h1": ("mamba.out_proj", "self_attn.o_proj"),
    "lfm2": ("conv.out_proj", "self_attn.out_proj"),
    "qwen3_5_text": ("linear_attn.out_proj", "self_attn.o_proj"),
}
DOWNS = {"falcon_h1": "feed_forward.down_proj", "lfm2": "feed_forward.w2", "qwen3_5_text": "mlp.down_proj"}
LAYER_TYPES = ["conv", "full_attention", "conv", "full_attention"]


def written_by(layer: Any, name: str) -> list[torch.nn.Linear]:
    """Return the linears of a layer that write to the stream before its FFN."""
    return [module for path, module in layer.named_modules() if path in WRITERS[name]]


@pytest.mark.parametrize("name", WRITERS)
@torch.inference_mode()
def test_a_profile_sees_the_layers_of_the_stock_class(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """What neurons are, and what the output loses without an FFN or without the mixer before it."""
    config = make_config(make_checkpoint(**CASES[name].options), output=str(tmp_path / "profile"))
    found, model = profile(config), AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
    text, probes = profiled_tokens(config)

    def predictions() -> torch.Tensor:
        return model(probes, use_cache=False).logits.double().log_softmax(-1)

    dense = predictions()
    for number, layer in enumerate(model.model.layers):
        seen: list[torch.Tensor] = []
        down, mixers = layer.get_submodule(DOWNS[name]), written_by(layer, name)
        handle = down.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        model(text, use_cache=False)
        handle.remove()
        expected = seen[0].double().flatten(0, 1).var(0, correction=0) * down.weight.double().square().sum(0)
        assert torch.allclose(found.ffn_fluctuation[number], expected, rtol=1e-3)
        for measured, linears in ((found.ffn_divergence, [down]), (found.head_divergence, mixers)):
            whole = [linear.weight.clone() for linear in linears]
            for linear in linears:
                linear.weight.zero_()
            lost = functional.kl_div(predictions(), dense, log_target=True, reduction="sum") / probes.numel()
            assert float(measured[number]) == pytest.approx(float(lost), rel=1e-3)
            for linear, weight in zip(linears, whole, strict=True):
                linear.weight.copy_(weight)
    carries = [not hasattr(layer, "self_attn") or name != "lfm2" for layer in model.model.layers]
    assert [not row.any() for row in found.head_errors] == carries
    assert [value == 0 for value in found.head_sensitivity.tolist()] == carries


@pytest.mark.parametrize(
    ("name", "expected"), [("lfm2", [9 + 10, 9 + 2, 9 + 10]), ("falcon_h1", [6 + 7, 6 + 7]), ("qwen3_5_text", [13, 14])]
)
@torch.inference_mode()
def test_seconds_of_a_layer_are_those_of_its_own_mixer(
    name: str, expected: list[float], make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call runs, and takes as many seconds as its place says: heads first, then widths, then carried mixers."""

    def least(calls: list[Callable[[], torch.Tensor]], _: torch.device) -> list[float]:
        assert all(call().shape == (1, 16, 32) for call in calls)
        return [float(place) for place in range(1, len(calls) + 1)]

    monkeypatch.setattr("oneshot.profiling.latency._least", least)
    model = open_model(str(make_checkpoint(**CASES[name].options)), tmp_path)
    seconds, stack = measured_seconds(model, cpu_machine(tmp_path), sequence_length=16), model.shape.stack()
    assert [seconds(replace(stack, layers=(layer,))) for layer in stack.layers] == expected
    equal = tuple(replace(one, tensors=model.shape.carried[0].tensors) for one in model.shape.carried)
    if len(equal) > 1:
        alike = replace(model, shape=replace(model.shape, carried=equal))
        with pytest.raises(PlanError, match="cannot tell the mixers of this qwen3_5_text apart"):
            measured_seconds(alike, cpu_machine(tmp_path), sequence_length=16)


@pytest.mark.parametrize("form", ["stock", "per-layer"])
@torch.inference_mode()
def test_a_result_is_the_model_without_whole_layers(
    form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """What a layer is depends on its number in the input, and not in the result."""
    folder = make_checkpoint(**CASES["lfm2"].options | {"layers": 4, "layer_types": LAYER_TYPES})
    config = make_config(folder, depth="sensitivity", ffn="none", sparsity=0.3, form=form)
    plan = compress(config).plan
    kept = [number for number, layer in enumerate(plan["layers"]) if layer["intermediate_size"]]
    assert 0 < len(kept) < 4
    result = load_model(Path(config.output), device=torch.device("cpu"), dtype=torch.float32)
    assert result.config.layer_types == [LAYER_TYPES[number] for number in kept]
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.model.layers = torch.nn.ModuleList(model.model.layers[number] for number in kept)
    tokens = torch.arange(3, 51).view(2, 24)
    model.config.layer_types, model.config.num_hidden_layers = result.config.layer_types, len(kept)
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(result(tokens, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
    assert_cache_changes_nothing(result, 6, input_ids=tokens[:, :5])


@torch.inference_mode()
def test_ranks_of_a_layer_that_gets_the_number_of_another_mixers(
    make_config: MakeConfig, save_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer, a convolution, adds nothing and goes; the second one's attention has a low rank."""
    model = build_model(**CASES["lfm2"].options)
    output = model.model.layers[1].self_attn.out_proj.weight
    output.copy_(output[:, :4] @ output[:4] / 2)
    for linear in (model.model.layers[0].conv.out_proj, model.model.layers[0].feed_forward.w2):
        torch.nn.init.zeros_(linear.weight)
    config = make_config(save_model(model), depth="sensitivity", sparsity=0.25, form="per-layer", round_to=8)
    last = keep_last_states(monkeypatch)
    first, second, _ = compress(config).plan["layers"]
    assert not first["intermediate_size"]
    assert second["output_rank"]
    result = load_model(Path(config.output), device=torch.device("cpu"), dtype=torch.float32)
    assert_passes(result, "model.layers", config, last[0])


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
def test_an_engine_that_keeps_keys_and_values_alone_is_refused(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    output = tmp_path / "result"
    compress(make_config(make_checkpoint(**CASES[name].options), form="per-layer", output=str(output)))
    config = AutoConfig.from_pretrained(output, trust_remote_code=True)
    config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match="does not keep; open this folder with transformers, or compress with"):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)
