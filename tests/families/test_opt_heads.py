"""Heads of OPT in the per-layer form: exact where heads are copies, and otherwise the stock model without them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, assert_cache_changes_nothing, build_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from oneshot.errors import PlanError
from oneshot.evaluation import load_model
from oneshot.pipeline import compress, profile

CPU, HEADS, SIZE = torch.device("cpu"), 4, 8
IDS = torch.randint(0, 400, (2, 24), generator=torch.Generator().manual_seed(1))
PARTS = ("q_proj", "k_proj", "v_proj")


@pytest.fixture
def copied_heads(save_model: Callable[..., Path]) -> Path:
    """Save a model whose last two heads compute what the first two do, with values of rank 4 in each head."""
    model = build_model("opt", layers=3)
    for layer in model.model.decoder.layers:
        attention = layer.self_attn
        narrow = torch.randn(HEADS, SIZE, 4) @ torch.randn(HEADS, 4, 32) / 12
        attention.v_proj.weight.data = narrow.flatten(0, 1)
        attention.v_proj.bias.data.zero_()
        for name in PARTS:
            for tensor in getattr(attention, name).parameters():
                tensor.data[2 * SIZE :] = tensor.data[: 2 * SIZE]
    return save_model(model)


def load(folder: Any) -> Any:
    return load_model(Path(folder), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": "same-layer"},
        {"correction": "two-stream"},
        {"correction": "same-layer", "allocation": "uniform"},
        {"correction": "same-layer", "value_size": 4},
        {"heads": "obs", "correction": "same-layer"},
    ],
    ids=str,
)
def test_copies_are_removed_without_a_loss(
    settings: dict[str, Any], copied_heads: Path, make_config: MakeConfig
) -> None:
    options: dict[str, Any] = {"form": "per-layer", "ffn": "none", "heads": "id", "damping": 1e-9} | settings
    sparsity = 0.09 if "value_size" in options else 0.06  # of a small model that is mostly embedding
    report = compress(make_config(copied_heads, num_sequences=32, sparsity=sparsity, **options))
    kept = [layer["num_attention_heads"] for layer in report.plan["layers"]]
    assert min(kept) >= 2
    assert sum(kept) < 3 * HEADS
    dense = AutoModelForCausalLM.from_pretrained(copied_heads, dtype=torch.float32).eval()
    result = load(report.config["output"])
    assert [layer.self_attn.q_proj.weight.shape[0] // SIZE for layer in result.model.layers] == kept
    with torch.no_grad():
        difference = (result(IDS).logits - dense(IDS).logits).abs().max() / dense(IDS).logits.abs().max()
        assert_cache_changes_nothing(result, 6, input_ids=IDS, pad_token_id=1)
    assert float(difference) < 2e-3


def test_without_a_correction_it_is_the_stock_model_that_ignores_heads(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(family="opt", layers=3)
    options: dict[str, Any] = {"ffn": "none", "heads": "random", "correction": "none", "allocation": "uniform"}
    report = compress(make_config(folder, form="per-layer", sparsity=0.06, **options))
    dense, result = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        load(report.config["output"]),
    )
    for layer, own in zip(dense.model.decoder.layers, result.model.layers, strict=True):
        attention = layer.self_attn
        rows = attention.q_proj.weight.detach().view(HEADS, SIZE, -1)
        kept = own.self_attn.q_proj.weight.detach().view(-1, SIZE, rows.shape[2])
        heads = [next(head for head in range(HEADS) if torch.equal(rows[head], one)) for one in kept]
        assert 0 < len(heads) < HEADS
        for head in set(range(HEADS)) - set(heads):
            attention.out_proj.weight.data[:, head * SIZE : (head + 1) * SIZE] = 0
    with torch.no_grad():
        torch.testing.assert_close(result(IDS).logits, dense(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"query_key_size": 4, "value_size": 4, "sparsity": 0.1},
        {"hidden": "pca", "hidden_size": 28, "sparsity": 0.2},
        {"ffn": "id", "sparsity": 0.3, "allocation": "uniform"},
    ],
    ids=str,
)
def test_fewer_heads_combine_with_all_other_sizes(
    settings: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Compare predicted with measured errors: the stream that the checkpoint's layers make is the predicted one."""
    options: dict[str, Any] = {"form": "per-layer", "ffn": "none", "heads": "id", "correction": "two-stream"}
    report = compress(make_config(make_checkpoint(family="opt", layers=2, width=128), **options | settings))
    for layer in report.layers:
        heads = next(one for one in layer.sublayers if one.kind == "heads")
        assert heads.kept_size < HEADS
        assert heads.predicted_error is not None
        assert heads.measured_error == pytest.approx(heads.predicted_error, rel=0.35)
    with torch.no_grad():
        assert torch.isfinite(load(report.config["output"])(IDS).logits).all()


def test_a_profile_measures_the_heads(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    found = profile(make_config(make_checkpoint(family="opt", layers=2)))
    assert found.head_errors.shape == found.head_tails.shape == (2, HEADS + 1)
    assert (found.head_errors.diff(dim=1) < 0).all()
    assert (found.head_sensitivity > 0).all()


def test_what_cannot_be_is_refused(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = make_checkpoint(family="opt")
    with pytest.raises(PlanError, match="--form per-layer"):
        compress(make_config(folder, heads="id"))
    with pytest.raises(PlanError, match="cannot have fewer heads"):
        compress(make_config(folder, heads="id", form="per-layer", budget="latency"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_stays_tied(tied: bool, save_model: Callable[..., Path], make_config: MakeConfig) -> None:
    """Remove neurons that are zero: the logits are the dense model's although no table has lost its rows' means."""
    model = build_model("opt", layers=2, tied=tied)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight += 0.3
        for layer in model.model.decoder.layers:
            for dead in (layer.fc1.weight[32:], layer.fc1.bias[32:], layer.fc2.weight[:, 32:]):
                dead.zero_()
    folder = save_model(model)
    config = make_config(folder, form="per-layer", sparsity=None, intermediate_size=32, embedding="none")
    report = compress(config)
    tensors = load_file(Path(config.output) / "model.safetensors")
    tables = [name for name, tensor in tensors.items() if tensor.shape == (400, 32)]
    assert sorted(tables) == (
        ["model.embed_tokens.weight"] if tied else ["lm_head.weight", "model.embed_tokens.weight"]
    )
    dense, result = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), load(config.output)
    stored = sum(tensor.numel() for tensor in tensors.values())
    assert report.stored_parameters["compressed"] == stored == sum(one.numel() for one in result.parameters())
    if tied:
        assert torch.equal(tensors["model.embed_tokens.weight"], dense.model.decoder.embed_tokens.weight)
        assert result.lm_head.weight is result.model.embed_tokens.weight
    with torch.no_grad():
        logits = [one(IDS).logits for one in (dense, result)]
        cached, anew = (
            result.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=use_cache, pad_token_id=1)
            for use_cache in (True, False)
        )
    assert float((logits[0] - logits[1]).abs().max() / logits[0].abs().max()) < 2e-4
    assert torch.equal(cached, anew)
