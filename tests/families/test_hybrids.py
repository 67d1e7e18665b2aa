"""Hybrids: what is no attention is carried through unchanged, and all else is compressed as in other families."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model, cpu_machine
from families.cases import CASES, variants
from families.test_cases import load, tensors_of
from last_states import assert_passes, keep_last_states
from safetensors.torch import load_file, save_file
from test_resume import contents, stop_before

from oneshot.checkpoint import open_model
from oneshot.errors import CheckpointError, PlanError
from oneshot.evaluation.models import cached
from oneshot.export import FORMS, form_of
from oneshot.pipeline import compress
from oneshot.report.layer_table import layer_table
from oneshot.stream import LayerBuilder

# what a run changes of each family: heads go where they can, but for a mixture whose attention is too small a part
CHANGED = {
    "falcon_h1": ("feed_forward",),
    "gemma4_text-experts": ("experts",),
    "gemma4_text-tokens": ("mlp",),
    "granitemoehybrid": ("shared_mlp", "self_attn"),
    "granitemoehybrid-experts": ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    "lfm2": ("feed_forward", "self_attn"),
    "lfm2_moe": ("feed_forward.experts",),
    "qwen3_5_moe_text": ("mlp.experts",),
    "qwen3_5_text": ("mlp",),
    "qwen3_next": ("mlp.experts",),
}


@pytest.mark.parametrize("name", CHANGED)
@torch.inference_mode()
def test_carried_mixers_are_the_inputs_bit_for_bit(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads go where attention is plain; the stream has the same states."""
    last = keep_last_states(monkeypatch)
    folder, refused = make_checkpoint(**variants()[name]), CASES[name.partition("-")[0]].refused
    config = make_config(folder, sparsity=0.15, heads="none" if "heads" in refused else "id")
    compress(config)
    result = load(Path(config.output))
    assert_passes(result, "model.layers", config, last[0])
    dense, stored = tensors_of(folder), tensors_of(Path(config.output))
    changed = {key for key in stored if key not in dense or not torch.equal(dense[key], stored[key])}
    parts = {part for part in CHANGED[name] if any(f".{part}." in key for key in changed)}
    assert parts == set(CHANGED[name])
    assert all(any(f".{part}." in key for part in parts) for key in changed)


@pytest.mark.parametrize(
    ("name", "form"),
    [("lfm2", "stock"), ("qwen3_next", "stock"), ("lfm2", "per-layer"), ("gemma4_text-tokens", "stock")],
)
def test_an_interrupted_run_ends_with_the_same_bytes(
    name: str, form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(**variants()[name]), form=form)
    compress(config)
    again = replace(config, output=f"{config.output}-again")
    stop_before(1, partial(compress, again))
    compress(replace(again, resume=True))
    assert contents(Path(again.output)) == contents(Path(config.output))


@pytest.mark.parametrize("name", [name for name in variants() if {name, name.partition("-")[0]} & CHANGED.keys()])
@torch.inference_mode()
def test_bytes_of_the_cache_are_those_of_layers_with_keys_and_values(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = make_checkpoint(**variants()[name])
    (cache,) = cached(load(folder)(torch.arange(3, 10).unsqueeze(0), use_cache=True)).values()
    holding = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    numbers = sum(layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel() for layer in holding)
    shape = open_model(str(folder), tmp_path).shape
    assert shape.stack().kv_bytes_per_token(1) == numbers > 0
    kept = 0
    for layer in cache.layers:
        by_name = (getattr(layer, part, {}).values() for part in ("recurrent_states", "conv_states"))
        recurrent, convolved = ([one.numel() for one in each if one is not None] for each in by_name)
        kept += sum(recurrent or convolved)
    assert shape.state_bytes == kept * torch.float32.itemsize


@pytest.mark.parametrize("change", ["another shape", "absent", "unknown"])
def test_tensors_of_carried_mixers_are_checked_against_the_class(
    change: str, own_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = own_checkpoint(**CASES["lfm2"].options)
    path, name = folder / "model.safetensors", "model.layers.2.conv.conv.weight"
    tensors = load_file(path)
    if change == "unknown":
        name = "model.layers.0.conv.gate.weight"
        tensors[name] = torch.ones(2)
    else:
        del tensors[name]
    if change == "another shape":
        tensors = {key: one[..., :2].contiguous() if ".conv.conv." in key else one for key, one in tensors.items()}
        name = "model.layers.0.conv.conv.weight"
        tensors["model.layers.2.conv.conv.weight"] = tensors[name].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} .* give a complete, unmodified checkpoint"):
        open_model(str(folder), tmp_path)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_unknown_types_of_layers_are_refused(name: str, own_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = own_checkpoint(**CASES[name].options)
    stated: dict[str, Any] = json.loads((folder / "config.json").read_text())
    stated["layer_types"][0] = "chunked_attention"
    (folder / "config.json").write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match="'chunked_attention' for layer 0, which is not supported; give a model"):
        open_model(str(folder), tmp_path)


def test_the_width_of_lfm2_under_the_name_of_the_hub(own_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = own_checkpoint(**CASES["lfm2"].options)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"block_ff_dim": stated.pop("intermediate_size")}))
    config = make_config(folder, sparsity=0.1)
    compress(config)
    assert load(Path(config.output)).config.intermediate_size < 48


def test_experts_in_one_tensor_are_read_and_written_so(
    own_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may have the parameters of the class; transformers writes experts one by one."""
    last = keep_last_states(monkeypatch)
    folder = own_checkpoint(**CASES["qwen3_5_moe_text"].options)
    path = folder / "model.safetensors"
    state = {key: one.contiguous() for key, one in load(folder).state_dict().items()}
    save_file(state, path, {"format": "pt"})
    config = make_config(folder, sparsity=0.15)
    compress(config)
    stored = tensors_of(Path(config.output))
    assert stored.keys() == state.keys()
    down = stored["model.layers.0.mlp.experts.down_proj"]
    assert down.shape[:2] == (4, 32)
    assert down.shape[2] < 32
    with torch.inference_mode():
        assert_passes(load(Path(config.output)), "model.layers", config, last[0])


@torch.inference_mode()
def test_what_stands_beside_experts_stays_and_counts(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Granite 4 adds the output of one FFN to the mixture's: a target without it would be another one."""
    last = keep_last_states(monkeypatch)
    folder = make_checkpoint(**variants()["granitemoehybrid-experts"])
    model = open_model(str(folder), tmp_path)
    layer = LayerBuilder(model, cpu_machine(tmp_path), 12).layer(0, model.read_layer(0))
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    routing = layer.route(1, x)
    assert not torch.allclose(routing.written, routing.mixed)
    torch.testing.assert_close(layer.run(1, x), x + layer.added(1, routing.written).view_as(x))
    config = make_config(folder, experts="effects", num_experts=3, sparsity=0.3)
    compress(config)
    result = load(Path(config.output))
    assert result.config.num_local_experts == 3
    assert result.config.intermediate_size < 32
    assert_passes(result, "model.layers", config, last[0])
    dense, stored = tensors_of(folder), tensors_of(Path(config.output))
    beside = [name for name in dense if ".shared_mlp." in name]
    assert beside
    assert all(torch.equal(dense[name], stored[name]) for name in beside)


@torch.inference_mode()
def test_texts_of_any_length_pass_modernbert_as_in_the_class(tmp_path: Path) -> None:
    """Positions and masks of the longest text are cut; the first layer has no norm before its attention."""
    stock = build_model(**CASES["modernbert"].options)
    stock.save_pretrained(tmp_path)
    model = open_model(str(tmp_path), tmp_path)
    builder = LayerBuilder(model, cpu_machine(tmp_path), 20)
    layers = [builder.layer(number, model.read_layer(number)) for number in range(4)]
    for length in (20, 9, 3):
        token_ids = torch.arange(5, 5 + length).unsqueeze(0)
        *states, _ = stock(token_ids, output_hidden_states=True).hidden_states
        for layer, before, after in zip(layers, states, states[1:], strict=False):
            torch.testing.assert_close(layer.run_all(before), after, rtol=1e-5, atol=1e-5)
    assert not torch.equal(layers[0].run_all(states[0]), layers[1].run_all(states[0]))


@pytest.mark.parametrize("name", [*CHANGED, "qwen3_5", "modernbert"])
def test_other_forms_are_refused_by_one_sentence(name: str, tmp_path: Path) -> None:
    case = CASES[name.partition("-")[0]]
    case.build(**variants().get(name, case.options)).save_pretrained(tmp_path)
    model = open_model(str(tmp_path), tmp_path)
    is_held = "per-layer form" not in case.refused
    held = ["stock", "per-layer"] if is_held else ["stock"]
    for form in (each for each in FORMS if each not in held):
        refusal = form_of(form, model.family).grid(model).refusal
        assert refusal is not None
        assert "; use " in refusal


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"form": "per-layer", "embedding": "low-rank"}, "layers read the embedding of their tokens again; leave it"),
        ({"budget": "latency"}, "keys of other layers; choose another budget"),
    ],
)
def test_layers_that_read_more_than_the_stream_are_refused_where_only_it_is_passed(
    changes: dict[str, Any], reason: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(PlanError, match=reason):
        compress(make_config(make_checkpoint(**variants()["gemma4_text-tokens"]), sparsity=0.1, **changes))


@torch.inference_mode()
def test_keys_of_layers_that_borrow_them_are_left_out(
    own_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may have them; the stock class does not read them. These layers have FFNs of twice the width."""
    last = keep_last_states(monkeypatch)
    folder = own_checkpoint(**variants()["gemma4_text-tokens"])
    path = folder / "model.safetensors"
    dense = load_file(path)
    parts = ("k_proj", "v_proj", "k_norm")
    further = {
        f"model.layers.{layer}.self_attn.{part}.weight": dense[f"model.layers.2.self_attn.{part}.weight"].clone()
        for layer in (3, 4)
        for part in parts
    }
    save_file(dense | further, path, {"format": "pt"})
    config = make_config(folder, sparsity=0.1, correction="two-stream")
    report = compress(config)
    stored = tensors_of(Path(config.output))
    assert stored.keys() == dense.keys()
    widths = [stored[f"model.layers.{layer}.mlp.up_proj.weight"].shape[0] for layer in range(5)]
    assert 64 > widths[0] == widths[2] == widths[3] / 2 == widths[4] / 2
    assert layer_table(report) == (["layer", "FFN"], [["0–2", str(widths[0])], ["3–4", str(widths[3])]])
    assert_passes(load(Path(config.output)), "model.layers", config, last[0])


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
def test_predicted_errors_are_those_on_the_text(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """The target also has what earlier layers lost; Falcon-H1 multiplies what its FFN writes by a number."""
    heads = {} if "heads" in CASES[name].refused else {"heads": "id"}
    config = make_config(
        make_checkpoint(**CASES[name].options), sparsity=0.15, correction="two-stream", residual_weight=1.0, **heads
    )
    found = [each for layer in compress(config).layers for each in layer.sublayers if each.measured_error is not None]
    assert {each.kind for each in found} == ({"heads", "ffn"} if heads else {"ffn"})
    for each in found:
        assert each.measured_error == pytest.approx(each.predicted_error, rel=5e-3)
