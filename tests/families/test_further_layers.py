"""Layers that predict tokens after the next one: results keep them, or promise none and say why."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from factories import MakeCheckpoint, MakeConfig, calibration_tokens
from further import COUNT, add_further_layers, last_layer
from safetensors.torch import load_file, save_file
from wrapper_models import build_wrapper

from oneshot.architecture.further import without_further
from oneshot.checkpoint import Checkpoint, further_layers, identify
from oneshot.compression import LayerCompressor
from oneshot.errors import ConfigError
from oneshot.export.resized import ResizedForm
from oneshot.pipeline import compress
from oneshot.report.card import CARD_NAME


@pytest.fixture
def further_checkpoint(own_checkpoint: MakeCheckpoint, tmp_path: Path, tokenizer_folder: Path) -> Any:
    """`further_checkpoint(family, count=1)` -> a folder, and the tensors of its layers for later tokens."""

    def make(name: str, count: int = 1) -> tuple[Path, dict[str, torch.Tensor]]:
        if name == "qwen3_5":
            folder = tmp_path / "own"
            build_wrapper(name).save_pretrained(folder)
            (folder / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
        else:
            folder = own_checkpoint(**CASES[name].options)
        return folder, add_further_layers(folder, name, count=count)

    return make


def promised(config: dict[str, Any]) -> dict[str, Any]:
    """Return all that a config.json states of such layers, also inside it, but for zeros and empty lists."""
    found = {name: config[name] for name, none in without_further(config).items() if config[name] != none}
    inner = config.get("text_config")
    return found | (promised(inner) if isinstance(inner, dict) else {})


def written(folder: Path, **options: Any) -> list[int]:
    """Return what a result writes; transformers finds such layers by the numbers of published models alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\..*"]
    return model.generate(torch.arange(2, 12)[None], max_new_tokens=12, do_sample=False, **options)[0].tolist()


@pytest.mark.parametrize("name", ["glm4_moe_lite", "qwen3_next", "qwen3_5"])
def test_they_stay_as_they_are_where_sizes_stay(name: str, further_checkpoint: Any, make_config: MakeConfig) -> None:
    folder, further = further_checkpoint(name)
    report = compress(make_config(folder, sparsity=0))
    output = Path(report.config["output"])
    dense, result = load_file(folder / "model.safetensors"), load_file(output / "model.safetensors")
    assert result.keys() == dense.keys()
    assert all(torch.equal(tensor, dense[key]) for key, tensor in result.items())
    config = json.loads((output / "config.json").read_text())
    stated = promised(json.loads((folder / "config.json").read_text()))
    assert stated.items() <= promised(config).items()
    counted = sum(tensor.numel() for tensor in dense.values()) - sum(tensor.numel() for tensor in further.values())
    assert report.stored_parameters == {"dense": counted, "compressed": counted}
    beside = sum(tensor.numel() for tensor in further.values())
    assert report.further_parameters == {"dense": beside, "compressed": beside}
    assert not [one for one in report.warnings if "left out of the result" in one]


@pytest.mark.parametrize(("name", "form"), [("glm4_moe", "stock"), ("glm4_moe", "per-layer"), ("deepseek_v3", "stock")])
def test_transformers_generates_with_them(
    name: str, form: str, further_checkpoint: Any, make_config: MakeConfig
) -> None:
    """The text is that without them; two of them stay whole where layers have sizes of their own."""
    folder, further = further_checkpoint(name, count=2)
    report = compress(make_config(folder, sparsity=0.2, form=form, correction="two-stream"))
    output = Path(report.config["output"])
    assert promised(json.loads((output / "config.json").read_text()))[COUNT] == 2
    assert written(output, use_mtp=True) == written(output)
    result = load_file(output / "model.safetensors")
    kept = {key: tensor for key, tensor in result.items() if key.startswith(("model.layers.3.", "model.layers.4."))}
    size = sum(tensor.numel() for tensor in kept.values())
    assert report.further_parameters is not None
    assert report.further_parameters["compressed"] == size
    before = sum(tensor.numel() for tensor in further.values())
    assert size < 0.95 * before if form == "stock" else size == before
    for key in (key for key in further if "mlp" not in key and "self_attn" not in key):
        assert torch.equal(result[key], further[key])


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text", "qwen3_5"])
def test_blocks_get_the_sizes_of_layers(name: str, further_checkpoint: Any, make_config: MakeConfig) -> None:
    """A stock config states one width for both. Where a layer goes, the numbers of those behind are lower."""
    folder, _ = further_checkpoint(name)
    removed = int(name == "glm4_moe")
    report = compress(
        make_config(folder, sparsity=0.3, depth="sensitivity", ffn="none")
        if removed
        else make_config(folder, sparsity=0.1, num_sequences=4)
    )
    output = Path(report.config["output"])
    config = json.loads((output / "config.json").read_text())
    text, result = config.get("text_config", config), load_file(output / "model.safetensors")
    own, layers = text["num_hidden_layers"], "model.layers"
    assert own == CASES[name].options.get("layers", own) - removed
    if name == "qwen3_5":
        layers = "model.language_model.layers"
    alike = f"{layers}.{last_layer(config)}."
    block = "mtp.layers.0." if name.startswith("qwen3") else f"{layers}.{own}."
    shapes = {key.removeprefix(alike): one.shape for key, one in result.items() if key.startswith(alike)}
    assert shapes
    assert shapes == {own: result[block + own].shape for own in shapes}
    numbers = [int(key.split(".layers.")[1].split(".")[0]) for key in result if f"{layers}." in key]
    assert max(numbers) == (own - 1 if name.startswith("qwen3") else own)
    assert (
        compress(make_config(output, sparsity=0, output=output.parent / "again")).stored_parameters["dense"]
        == (report.stored_parameters["compressed"])
    )


def test_states_enter_as_in_transformers(
    further_checkpoint: Any, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare what the first two blocks read of the dense stream; the last token of a sequence is unknown there."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    import oneshot.job.layers as further

    folder, _ = further_checkpoint("deepseek_v3", count=2)
    entered: list[torch.Tensor] = []

    def enter(states: Any, *rest: Any) -> None:
        enter_further(states, *rest)
        entered.extend(dense.clone() for _, dense in states.read(again=True))

    enter_further = further.enter_further
    monkeypatch.setattr(further, "enter_further", enter)
    config = make_config(folder, correction="two-stream")
    compress(config)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\..*"]
    drafts, read = MtpModel.from_pretrained(model), list[torch.Tensor]()
    for layer in drafts.layers:
        layer.mtp_block.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    tokens = calibration_tokens(config)
    with torch.inference_mode():
        states = model.model(tokens).last_hidden_state
        for index in range(2):
            states = states[:, : tokens.shape[1] - 1 - index]
            positions = torch.arange(states.shape[1])[None]
            states = drafts.forward_layer(index, states, positions, None, input_ids=tokens[:, index + 1 :])
    for mine, theirs in zip(entered, read, strict=True):
        torch.testing.assert_close(mine[:, : theirs.shape[1]], theirs, rtol=1e-4, atol=1e-4)


def _damaged(folder: Path, change: str) -> None:
    path, place = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(path), json.loads(place.read_text())
    if change == "lacks":
        del tensors["model.layers.3.mlp.gate.weight"]
    elif change == "lacks a norm":
        del tensors["model.layers.3.hnorm.weight"]
    elif change == "shape":
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(32, 32)
    elif change == "unknown":
        tensors["mtp.other.weight"] = torch.ones(3)
    elif change == "count":
        config[COUNT] = 2
    save_file(tensors, path, {"format": "pt"})
    place.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "cause"),
    {
        "lacks": "model.layers.3.mlp.gate.weight",
        "lacks a norm": "model.layers.3.hnorm.weight is missing",
        "shape": r"eh_proj.weight has shape \(32, 32\)",
        "unknown": "mtp.other.weight belongs to none of the 1 layers",
        "count": "model.layers.4.eh_proj.weight is missing",
    }.items(),
)
def test_incomplete_layers_are_not_taken(change: str, cause: str, further_checkpoint: Any) -> None:
    folder, _ = further_checkpoint("glm4_moe")
    _damaged(folder, change)
    assert re.search(cause, str(further_layers(identify(Checkpoint(folder)))))


def test_layers_that_are_not_taken_are_left_out(further_checkpoint: Any, make_config: MakeConfig) -> None:
    """The config promises none, and the run, its report and the card say that they are gone, and why."""
    folder, further = further_checkpoint("glm4_moe")
    _damaged(folder, "lacks a norm")
    report = compress(make_config(folder, sparsity=0))
    output = Path(report.config["output"])
    assert not load_file(output / "model.safetensors").keys() & further.keys()
    assert promised(json.loads((output / "config.json").read_text())) == {}
    assert report.further_parameters is None
    told = [one for one in report.warnings if "left out of the result" in one]
    assert len(told) == 1
    assert "model.layers.3.hnorm.weight is missing" in told[0]
    assert "left out of the result" in (output / CARD_NAME).read_text()


def test_the_embedding_stays_whole_beside_them(
    further_checkpoint: Any, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Engines give them the whole table; without them it may have ranks."""
    folder, _ = further_checkpoint("glm4_moe")
    for one, ranked in ((folder, False), (make_checkpoint(**CASES["glm4_moe"].options), True)):
        assert ResizedForm().grid(identify(Checkpoint(one))).ranks_embedding == ranked
    with pytest.raises(ConfigError, match="embedding=low-rank"):
        compress(make_config(folder, sparsity=0.2, form="per-layer", embedding="low-rank"))


def test_a_form_without_their_class_promises_none(further_checkpoint: Any, make_config: MakeConfig) -> None:
    folder, _ = further_checkpoint("qwen3_next")
    report = compress(make_config(folder, sparsity=0, form="per-layer"))
    output = Path(report.config["output"])
    assert promised(json.loads((output / "config.json").read_text())) == {}
    assert not [key for key in load_file(output / "model.safetensors") if key.startswith("mtp.")]
    assert any("--form stock" in one for one in report.warnings)


def test_resumed_blocks_have_the_same_bytes(
    further_checkpoint: Any, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is interrupted before the first block, and again before the second one."""
    folder, _ = further_checkpoint("glm4_moe", count=2)
    options: dict[str, Any] = {"correction": "two-stream", "save_dtype": "bfloat16", "num_sequences": 4}
    whole = make_config(folder, **options)
    compress(whole)
    config = make_config(folder, output=folder.parent / "resumed", **options)
    original = LayerCompressor.compress_layer
    for allowed in (3, 1):
        left = iter(range(allowed))

        def interrupted(self: LayerCompressor, *rest: Any, left: Any = left) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return original(self, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(LayerCompressor, "compress_layer", interrupted)
            with pytest.raises(KeyboardInterrupt):
                compress(replace(config, resume=True))
    resumed = compress(replace(config, resume=True))
    weights = [Path(one) / "model.safetensors" for one in (whole.output, config.output)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [layer.layer for layer in resumed.layers] == [0, 1, 2]
