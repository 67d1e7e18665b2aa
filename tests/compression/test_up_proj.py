"""The correction of `up_proj` against least squares by brute force in float64."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig

from oneshot import OneshotError, compress
from oneshot.arch import LLAMA
from oneshot.checkpoint import Checkpoint
from oneshot.layerwise.up_proj import up_proj_step
from oneshot.report import ProgressBar
from oneshot.stream import LayerStream
from oneshot.workers import ALONE

DOUBLE = np.float64
NUM_KEPT = 9


def silu(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("two_streams", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
@torch.inference_mode()
def test_many_steps_are_least_squares(two_streams: bool, mlp_bias: bool, make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = Checkpoint(make_checkpoint(hidden=8, width=12, heads=2, groups=1, mlp_bias=mlp_bias))
    dense = checkpoint.read_prefix("model.layers.0.")
    generator = torch.Generator().manual_seed(3)
    down = dense["mlp.down_proj.weight"][:, :NUM_KEPT] + 0.1 * torch.randn(8, NUM_KEPT, generator=generator)
    kept = {
        name: tensor[:NUM_KEPT] if name.startswith(("mlp.gate_proj", "mlp.up_proj")) else tensor
        for name, tensor in dense.items()
    } | {"mlp.down_proj.weight": down}
    stream, narrow = (
        LayerStream(
            checkpoint.config | {"intermediate_size": width},
            LLAMA,
            sequence_length=30,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        for width in (12, NUM_KEPT)
    )
    states = torch.randn(4, 30, 8, generator=generator)
    wanted = torch.randn(4, 30, 8, generator=generator) if two_streams else None

    def read(every: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        for index in range(0, 4, every):
            batch = slice(index, index + 1)
            yield batch, states[batch], None if wanted is None else wanted[batch]

    def step(steps: int) -> np.ndarray[Any, Any]:
        found = up_proj_step(
            SimpleNamespace(read=read, workers=ALONE),  # type: ignore[arg-type]
            stream.layer(dense),
            narrow.layer(kept),
            down,
            steps=steps,
            every=2,
            residual_weight=0.25,
            damping=1e-2,
            advance=lambda _: None,
        )
        return found.numpy().astype(DOUBLE)

    h = states[::2].flatten(0, 1).numpy().astype(DOUBLE)
    normed = h / np.sqrt((h**2).mean(1, keepdims=True) + checkpoint.config["rms_norm_eps"])
    normed *= dense["post_attention_layernorm.weight"].numpy()

    def parts(tensors: dict[str, torch.Tensor]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The gates, and the FFN's output."""
        values = {name: tensor.numpy().astype(DOUBLE) for name, tensor in tensors.items()}

        def linear(name: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return rows @ values[f"mlp.{name}.weight"].T + values.get(f"mlp.{name}.bias", 0)

        gates = silu(linear("gate_proj", normed))
        return gates, linear("down_proj", gates * linear("up_proj", normed))

    gates, reached = parts(kept)
    _, target = parts(dense)
    if wanted is not None:
        target = 0.75 * target + 0.25 * (wanted[::2].flatten(0, 1).numpy() - h)
    lost = target - reached
    design = np.einsum("oj,tj,ta->toja", down.numpy().astype(DOUBLE), gates, normed).reshape(lost.size, -1)
    best = np.linalg.lstsq(design, lost.ravel(), rcond=None)[0]

    def error(solution: np.ndarray[Any, Any]) -> float:
        return float(np.linalg.norm(lost.ravel() - design @ solution.ravel()))

    assert error(step(50)) == pytest.approx(error(best), rel=1e-3)
    errors = [np.linalg.norm(lost), error(step(1)), error(step(2)), error(step(8))]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_the_error_on_the_text_that_was_read_falls(
    mlp_bias: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_checkpoint(layers=3, mlp_bias=mlp_bias)
    errors = []
    for steps in (0, 3):
        output = str(tmp_path / str(steps))
        config = make_config(folder, output=output, up_steps=steps, correction="same-layer")
        report = compress(config)
        assert report.recipe["up_steps"] == steps
        errors.append([layer.blocks[-1].measured_error for layer in report.layers])
    assert all(corrected < plain for plain, corrected in zip(*errors, strict=True))


@pytest.mark.parametrize("settings", [{"correction": "none"}, {"recipe": "tcsp"}, {"recipe": "flap"}], ids=str)
def test_where_it_has_no_place(
    settings: dict[str, str], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(OneshotError, match="--up-steps needs"):
        compress(make_config(make_checkpoint(), up_steps=2, **settings))


def test_an_ffn_without_a_gate(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    with pytest.raises(OneshotError, match="--up-steps needs FFNs with a gate"):
        compress(make_config(make_checkpoint(family="opt", groups=4), up_steps=2))


@pytest.mark.parametrize("settings", [{"up_steps": 3}, {"up_steps": 3, "heads": "id"}, {"up_steps": 0}], ids=str)
def test_progress_counts_every_token_once_for_each_layer(
    settings: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[float] = []
    monkeypatch.setattr(ProgressBar, "advance", lambda _, num_tokens: counted.append(num_tokens))
    report = compress(make_config(make_checkpoint(layers=3), **settings))
    assert report.calibration is not None
    assert sum(counted) == pytest.approx(3 * report.calibration["num_tokens"])
