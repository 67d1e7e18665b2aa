"""OPT as OPT-350m is: norms after the sums, no final norm, a narrow embedding that is projected in and out."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import (
    MakeCheckpoint,
    MakeConfig,
    assert_cache_changes_nothing,
    build_model,
    calibration_tokens,
    cpu_machine,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from oneshot.checkpoint import open_model
from oneshot.errors import CheckpointError, OneshotError
from oneshot.families import FAMILIES
from oneshot.pipeline import compress, profile
from oneshot.stream import LayerBuilder, OutputHead, States
from oneshot.text import Text

IDS = torch.randint(0, 400, (3, 24), generator=torch.Generator().manual_seed(1))
LIKE_350M: dict[str, Any] = {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "350m": LIKE_350M | {"tied": True},
    "350m-untied": LIKE_350M,
    "post-norm-only": {"do_layer_norm_before": False, "tied": True},
    "projections-only": {"word_embed_proj_dim": 48, "tied": True},
}
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=VARIANTS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"family": "opt", "groups": 4, "layers": 3, "width": 96} | VARIANTS[request.param]


def outputs_of_layers(model: Any, token_ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the input of every layer and the last one's output, and the logits, by hooks."""
    layers, found = model.model.decoder.layers, []
    handles = [layer.register_forward_pre_hook(lambda _, args: found.append(args[0].clone())) for layer in layers]
    handles.append(layers[-1].register_forward_hook(lambda _, __, output: found.append(output.clone())))
    with torch.inference_mode():
        logits = model(token_ids).logits
    for handle in handles:
        handle.remove()
    return found, logits


@torch.inference_mode()
def test_layers_and_logits_equal_the_stock_model(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    stock, model = build_model(**options), open_model(str(make_checkpoint(**options)), tmp_path)
    expected, logits = outputs_of_layers(stock, IDS)
    builder = LayerBuilder(model, cpu_machine(tmp_path), IDS.shape[1])
    x = builder.embed(model.read_embedding(), Text(IDS, "text").batches(3)[0])
    for number in range(3):
        assert_close(x, expected[number])
        x = builder.layer(number, model.read_layer(number)).run_all(x)
    assert_close(x, expected[3])
    head = builder.output()
    assert isinstance(head, OutputHead)
    assert_close(head.norm(x) @ head.weight.T, logits, rtol=1e-4, atol=1e-4)


def test_sizes_equal_the_stock_model(options: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    stock, shape = build_model(**options), open_model(str(make_checkpoint(**options)), tmp_path).shape
    assert shape.stack().stored_parameters() == sum(one.numel() for one in stock.parameters())
    linears = sum(one.weight.numel() for one in stock.modules() if isinstance(one, torch.nn.Linear))
    biases = sum(
        one.bias.numel() for one in stock.modules() if isinstance(one, torch.nn.Linear) and one.bias is not None
    )
    assert shape.stack().flops_per_token() == 2 * (linears + biases)


def test_nothing_removed_gives_the_same_bits(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**options)
    config = make_config(folder, sparsity=0.0)
    compress(config)
    before, after = (load_file(Path(each) / "model.safetensors") for each in (folder, config.output))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("correction", ["same-layer", "two-stream"])
def test_the_stream_has_the_hidden_states_of_the_stored_model(
    correction: str,
    options: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, ends = make_checkpoint(**options), []

    def close(self: States) -> None:
        ends.extend(x.clone() for x, _ in self.read())

    monkeypatch.setattr(States, "close", close)
    config = make_config(folder, correction=correction)
    report = compress(config)
    result, info = AutoModelForCausalLM.from_pretrained(config.output, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert result.num_parameters() == report.stored_parameters["compressed"] < report.stored_parameters["dense"]
    assert (result.lm_head.weight is result.model.decoder.embed_tokens.weight) == options.get("tied", False)
    found, _ = outputs_of_layers(result.eval(), calibration_tokens(config))
    assert_close(torch.cat(ends), found[-1], rtol=1e-4, atol=1e-4)
    for layer in report.layers:
        ffn = layer.sublayers[0]
        assert ffn.predicted_error is not None
        assert ffn.measured_error == pytest.approx(ffn.predicted_error, rel=0.35)
    with torch.no_grad():
        assert_cache_changes_nothing(result, 6, input_ids=IDS, pad_token_id=1)


def test_silent_neurons_are_removed_without_a_loss(save_model: Callable[..., Path], make_config: MakeConfig) -> None:
    dense = build_model("opt", groups=4, tied=True, **LIKE_350M)
    with torch.no_grad():
        for layer in dense.model.decoder.layers:
            for silent in (layer.fc1.weight[32:], layer.fc1.bias[32:], layer.fc2.weight[:, 32:]):
                silent.zero_()
    config = make_config(save_model(dense), sparsity=None, intermediate_size=32, damping=1e-9)
    compress(config)
    result = AutoModelForCausalLM.from_pretrained(config.output).eval()
    with torch.no_grad():
        torch.testing.assert_close(result(IDS).logits, dense(IDS).logits, rtol=1e-3, atol=1e-3)


def test_a_profile_measures_its_widths(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    found = profile(make_config(make_checkpoint(family="opt", groups=4, **LIKE_350M)))
    assert (found.ffn_errors.diff(dim=1) <= 0).all()
    assert (found.ffn_sensitivity > 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "per-layer"}, "use --form stock"),
        ({"form": "gguf"}, "needs RMSNorms"),
        ({"heads": "id"}, "use --set heads=none"),
        ({"hidden": "pca", "hidden_size": 24}, "Hidden size 24 .* leave it out"),
        ({"value_size": 4}, "value_size=4 is not possible for this opt; give --sparsity"),
        ({"depth": "sublayers"}, "depth=sublayers is not possible for this opt; set depth=sensitivity"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    settings: dict[str, Any], message: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(family="opt", groups=4, **LIKE_350M)
    with pytest.raises(OneshotError, match=message):
        compress(make_config(folder, **settings))


def test_a_missing_final_norm_is_refused() -> None:
    with pytest.raises(CheckpointError, match="lacks its final norm"):
        FAMILIES["opt"].check({"_remove_final_layer_norm": True})
