"""Every family of the table through whole runs in the stock form: what is stored, and what the stock class computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from factories import (
    MakeCheckpoint,
    MakeConfig,
    assert_cache_changes_nothing,
    stored_numbers,
)
from families.cases import OTHER_CLASSES, variants
from last_states import assert_passes, keep_last_states
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from oneshot.checkpoint import open_model
from oneshot.pipeline import compress

# those with tests of their own for every recipe are left out
WHOLE_RUNS = {
    name: options
    for name, options in variants().items()
    if name.partition("-")[0] not in ("llama", "mistral", "qwen2", "qwen3", "opt")
} | OTHER_CLASSES


def load(folder: Path) -> Any:
    """Return the model of the class that the config states; nothing is missing, nothing unexpected."""
    [stated] = AutoConfig.from_pretrained(folder).architectures
    model, info = getattr(transformers, stated).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_nothing_removed_is_the_input_bit_for_bit(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**WHOLE_RUNS[name])
    config = make_config(folder, sparsity=0)
    compress(config)
    dense, result = tensors_of(folder), tensors_of(Path(config.output))
    assert dense.keys() == result.keys()
    assert all(torch.equal(tensor, result[key]) for key, tensor in dense.items())


@pytest.mark.parametrize("name", WHOLE_RUNS)
@torch.inference_mode()
def test_a_result_computes_what_the_stream_passed(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock class has the hidden states of the stream, whose last batch the compressor leaves behind."""
    last = keep_last_states(monkeypatch)
    config = make_config(make_checkpoint(**WHOLE_RUNS[name]), sparsity=0.1)
    report = compress(config)
    result = load(Path(config.output))
    assert stored_numbers(result) == report.stored_parameters["compressed"]
    model = open_model(config.output, Path(config.output))
    assert_passes(result, model.family.stack.layers, config, last[0])
    if "lm_head.weight" not in result.state_dict():
        return
    assert_cache_changes_nothing(result, 6, input_ids=torch.arange(3, 8).unsqueeze(0))


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_old_tensors_are_read_as_transformers_reads_them(
    name: str, own_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Files on the hub have buffers of masks, and names without the prefix of the class."""
    folder = own_checkpoint(**WHOLE_RUNS[name])
    path = folder / "model.safetensors"
    dense = {key.removeprefix("transformer."): tensor for key, tensor in load_file(path).items()}
    attention = {"gpt2": "h.0.attn", "gpt_neox": "gpt_neox.layers.0.attention"}[name]
    buffers = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "masked_bias": torch.tensor(-1e9)}
    save_file(dense | {f"{attention}.{part}": buffer for part, buffer in buffers.items()}, path, {"format": "pt"})
    config = make_config(folder, sparsity=0)
    compress(config)
    result = tensors_of(Path(config.output))
    assert result.keys() == {f"transformer.{key}" if name == "gpt2" else key for key in dense}
    assert all(torch.equal(tensor, dense[key.removeprefix("transformer.")]) for key, tensor in result.items())
    load(Path(config.output))


@pytest.mark.parametrize(
    "correction", [{"correction": "same-layer"}, {"correction": "two-stream", "residual_weight": 1.0}], ids=str
)
@pytest.mark.parametrize("name", ["cohere", "gpt_neox"])
def test_predicted_errors_of_parallel_sublayers_are_those_on_the_text(
    name: str, correction: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Both sublayers read one state; the target of the second one also has what the first one lost."""
    heads = {"heads": "id"} if name == "cohere" else {}
    config = make_config(make_checkpoint(**WHOLE_RUNS[name]), sparsity=0.15, **correction, **heads)
    report = compress(config)
    found = [each for layer in report.layers for each in layer.sublayers if each.measured_error is not None]
    assert {each.kind for each in found} == ({"heads", "ffn"} if heads else {"ffn"})
    for each in found:
        assert each.measured_error == pytest.approx(each.predicted_error, rel=5e-3)
