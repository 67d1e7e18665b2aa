"""The layer-by-layer stream against transformers' own forward pass; stores, tiers and prefetching."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, build_model
from strategies import TOLERANCES
from torch.nn import functional

from oneshot.activations import ActivationStore
from oneshot.arch import LLAMA, OPT
from oneshot.checkpoint import Checkpoint
from oneshot.errors import CalibrationError, DeviceError
from oneshot.output_head import OutputHead
from oneshot.source import open_model
from oneshot.stream import (
    LayerStream,
    StreamLayer,
    batches,
    prefetch,
    resolve_device,
)

CPU = torch.device("cpu")
TOKEN_IDS = torch.randint(0, 400, (3, 24), generator=torch.Generator().manual_seed(1))
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"layers": 3},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-mha": {"groups": 4},
    "llama-one-kv-head": {"groups": 1, "tied": True},
    "llama-wide-heads": {"head_dim": 16},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "mistral": {"family": "mistral"},
    "mistral-window": {"family": "mistral", "sliding_window": 7},
    "qwen2": {"family": "qwen2", "layers": 3},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "mistral-window-longer-than-the-text": {"family": "mistral", "sliding_window": 100},
}


def open_stream(folder: Path) -> tuple[Checkpoint, LayerStream]:
    checkpoint = Checkpoint(folder)
    return checkpoint, LayerStream(
        checkpoint.config, LLAMA, sequence_length=TOKEN_IDS.shape[1], device=CPU, dtype=torch.float32
    )


@torch.inference_mode()
def test_layers_of_another_family_equal_transformers_hidden_states(make_checkpoint: MakeCheckpoint) -> None:
    source = open_model(str(make_checkpoint(family="opt", layers=3)), Path())
    model = build_model("opt", layers=3)
    wanted = model(TOKEN_IDS, output_hidden_states=True).hidden_states
    stream = LayerStream(
        source.checkpoint.config, OPT, sequence_length=TOKEN_IDS.shape[1], device=CPU, dtype=torch.float32
    )
    x = stream.embed(source.checkpoint.read_one(OPT.embedding), TOKEN_IDS, source.read_positions())
    for number in range(3):
        torch.testing.assert_close(x, wanted[number], rtol=1e-5, atol=1e-5)
        layer = stream.layer(source.read_layer(number))
        x = layer.ffn(layer.attention(x))
    torch.testing.assert_close(model.model.decoder.final_layer_norm(x), wanted[3], rtol=1e-5, atol=1e-5)


def test_a_text_longer_than_the_positions_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    source = open_model(str(make_checkpoint(family="opt")), Path())
    ids = torch.zeros(1, 600, dtype=torch.int64)
    stream = LayerStream(source.checkpoint.config, OPT, sequence_length=600, device=CPU, dtype=torch.float32)
    with pytest.raises(CalibrationError, match="512 positions"):
        stream.embed(source.checkpoint.read_one(OPT.embedding), ids, source.read_positions())


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_layers_equal_transformers_hidden_states(variant: str, make_checkpoint: MakeCheckpoint) -> None:
    options = VARIANTS[variant]
    model = build_model(**options)
    wanted = model(TOKEN_IDS, output_hidden_states=True).hidden_states
    consumed: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.register_forward_pre_hook(lambda _, inputs, name=name: consumed.update({name: inputs[0]}))
    model(TOKEN_IDS)

    checkpoint, stream = open_stream(make_checkpoint(**options))
    x = stream.embed(checkpoint.read(["model.embed_tokens.weight"])["model.embed_tokens.weight"], TOKEN_IDS)
    for number in range(len(wanted) - 1):
        torch.testing.assert_close(
            x, wanted[number], rtol=TOLERANCES["float32 layer"], atol=TOLERANCES["float32 layer"]
        )
        prefix = f"model.layers.{number}."
        layer = stream.layer(checkpoint.read_prefix(prefix))
        h = layer.attention(x)
        heads, neurons = layer.heads(x), layer.neurons(h)
        for got, name in ((heads, "self_attn.o_proj"), (neurons, "mlp.down_proj")):
            torch.testing.assert_close(got, consumed[prefix + name].flatten(0, 1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x + layer.project_heads(heads).view_as(x), h)
        x = layer.ffn(h)
        torch.testing.assert_close(h + layer.project_neurons(neurons).view_as(h), x)
    normed = model.model.norm(x)
    torch.testing.assert_close(normed, wanted[-1], rtol=TOLERANCES["float32 layer"], atol=TOLERANCES["float32 layer"])


@torch.inference_mode()
def test_the_sliding_window_matters_here(make_checkpoint: MakeCheckpoint) -> None:
    """Without this the window variant above could pass with no window at all."""
    outputs = []
    for window in (7, None):
        checkpoint, stream = open_stream(make_checkpoint(family="mistral", sliding_window=window))
        layer = stream.layer(checkpoint.read_prefix("model.layers.0."))
        outputs.append(layer.attention(torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(2))))
    torch.testing.assert_close(outputs[0][:, :7], outputs[1][:, :7])
    assert float((outputs[0] - outputs[1])[:, 7:].abs().max()) > 1e-3


@torch.inference_mode()
def test_a_bfloat16_stream_is_near_the_float32_one(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = Checkpoint(make_checkpoint())
    x = torch.randn(2, 24, 32)
    results: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        stream = LayerStream(checkpoint.config, LLAMA, sequence_length=24, device=CPU, dtype=dtype)
        layer = stream.layer(checkpoint.read_prefix("model.layers.0."))
        results.append(layer.ffn(layer.attention(x.to(dtype))))
    assert results[1].dtype == torch.bfloat16
    assert 0 < float((results[0] - results[1]).norm() / results[0].norm()) < 0.02


def test_layers_hold_no_gradients(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint, stream = open_stream(make_checkpoint())
    layer: StreamLayer = stream.layer(checkpoint.read_prefix("model.layers.0."))
    assert not layer.ffn(layer.attention(torch.randn(1, 24, 32))).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_stores_give_back_the_same_bits(tier: str, dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(5, 3, 4).to(dtype)
    values[0, 0] = torch.tensor([torch.inf, -0.0, torch.nan, 1e-38])
    store = ActivationStore((5, 3, 4), dtype, tier=tier, device=CPU, folder=tmp_path)
    other = ActivationStore((5, 3, 4), dtype, tier=tier, device=CPU, folder=tmp_path)
    order = batches(5, 2)
    for batch in reversed(order):
        store.write(batch, values[batch])
        other.write(batch, values[batch] + 1)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for batch in order:
        read = store.read(batch)
        assert read.dtype == dtype
        assert torch.equal(read.view(bits), values[batch].contiguous().view(bits))
        read.zero_()  # a copy: the store must not see this
    assert torch.equal(store.read(order[0]).view(bits), values[:2].contiguous().view(bits))
    assert not list(tmp_path.iterdir())  # a file without a name: nothing stays behind, not even after SIGKILL
    store.close()
    other.close()


def test_batches_cover_every_sequence_once() -> None:
    assert batches(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert batches(2, 5) == [slice(0, 2)]


def test_prefetch_keeps_the_order_and_loads_one_ahead() -> None:
    started = [threading.Event() for _ in range(4)]
    here = threading.get_ident()
    threads = set()

    def load(index: int) -> int:
        threads.add(threading.get_ident())
        started[index].set()
        return index * 10

    seen = []
    for index, value in enumerate(prefetch(load, 4)):
        if index < 3:
            assert started[index + 1].wait(timeout=10), "the next one is loaded while this one is worked on"
        assert not any(event.is_set() for event in started[index + 2 :]), "no more than one is held ahead"
        seen.append(value)
    assert seen == [0, 10, 20, 30]
    assert here not in threads


def test_prefetch_hands_errors_on() -> None:
    def load(index: int) -> int:
        if index == 1:
            raise KeyError("damaged")
        return index

    results = prefetch(load, 3)
    assert next(results) == 0
    with pytest.raises(KeyError, match="damaged"):
        next(results)


def test_prefetch_stops_its_thread_when_the_caller_fails() -> None:
    def consume() -> None:
        for _ in prefetch(lambda index: index, 3):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        consume()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch") and thread.is_alive()]


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "meta", "cpu:x"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(DeviceError, match=name):
        resolve_device(name)


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Callable[[], bool]
    for there, wanted in ((lambda: False, "cpu"), (lambda: True, "cuda")):
        monkeypatch.setattr("torch.cuda.is_available", there)
        assert resolve_device("auto").type == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distance", [0.0, 1e-2, 1.0])
def test_the_divergence_of_predictions_is_that_of_their_softmaxes(
    distance: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against log-softmaxes of whole rows in float64; the vocabulary is no multiple of a panel."""
    monkeypatch.setattr("oneshot.output_head.VOCABULARY_PANEL", 64)
    generator = torch.Generator().manual_seed(2)
    dense = torch.randn(7, 32, generator=generator).to(dtype)
    other = (dense + distance * torch.randn(7, 32, generator=generator)).to(dtype)
    head = OutputHead(torch.nn.LayerNorm(32, dtype=dtype), torch.randn(150, 32, generator=generator).to(dtype))

    def log_softmax(x: torch.Tensor) -> torch.Tensor:
        return (head.norm(x).double() @ head.weight.double().T).log_softmax(-1)

    with torch.no_grad():
        wanted = functional.kl_div(log_softmax(other), log_softmax(dense), log_target=True, reduction="none").sum(-1)
        torch.testing.assert_close(
            head.divergence(head.prediction(dense), other).double(), wanted, rtol=1e-4, atol=2e-5
        )
