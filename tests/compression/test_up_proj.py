"""The correction of `up_proj` against least squares by brute force in float64."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, cpu_machine

from oneshot import OneshotError
from oneshot.checkpoint import open_model
from oneshot.compression.up_proj import up_proj_step
from oneshot.families import LLAMA
from oneshot.pipeline import compress
from oneshot.report.progress import ProgressBar
from oneshot.stream import LayerBuilder

DOUBLE = np.float64
NUM_KEPT = 9


def silu(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x / (1 + np.exp(-x))


FFN, INDEX = LLAMA.stack.ffn, LLAMA.stack.index_of("ffn")


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("two_streams", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
@torch.inference_mode()
def test_many_steps_equal_least_squares(
    two_streams: bool, mlp_bias: bool, rank: int | None, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model = open_model(str(make_checkpoint(hidden=8, width=12, heads=2, groups=1, mlp_bias=mlp_bias)), tmp_path)
    dense = model.read_layer(0)
    generator = torch.Generator().manual_seed(3)
    down = dense[f"{FFN.down}.weight"][:, :NUM_KEPT] + 0.1 * torch.randn(8, NUM_KEPT, generator=generator)
    narrow = {name: tensor[:NUM_KEPT] if name.startswith(FFN.readers) else tensor for name, tensor in dense.items()}
    narrow |= {f"{FFN.down}.weight": down}
    machine = cpu_machine(tmp_path)
    builder = LayerBuilder(model, machine, 30)
    states = torch.randn(4, 30, 8, generator=generator)
    dense_states = torch.randn(4, 30, 8, generator=generator) if two_streams else None
    low_rank = None if rank is None else torch.randn(rank, 8, generator=generator)

    def read(every: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        for index in range(0, 4, every):
            batch = slice(index, index + 1)
            yield states[batch], None if dense_states is None else dense_states[batch]

    def step(steps: int) -> np.ndarray[Any, Any]:
        correction = up_proj_step(
            SimpleNamespace(read=read, machine=machine),  # type: ignore[arg-type]
            INDEX,
            builder.layer(0, dense),
            builder.layer(0, narrow),
            down,
            steps=steps,
            every=2,
            residual_weight=0.25,
            damping=1e-2,
            read=low_rank,
        )
        return correction.numpy().astype(DOUBLE)

    h = states[::2].flatten(0, 1).numpy().astype(DOUBLE)
    normed = h / np.sqrt((h**2).mean(1, keepdims=True) + model.checkpoint.config["rms_norm_eps"])
    normed *= dense[f"{LLAMA.stack.sublayers[INDEX].norm.name}.weight"].numpy()

    def parts(tensors: dict[str, torch.Tensor]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the gates and the FFN's output."""
        values = {name: tensor.numpy().astype(DOUBLE) for name, tensor in tensors.items()}

        def linear(name: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return rows @ values[f"{name}.weight"].T + values.get(f"{name}.bias", 0)

        assert FFN.gate is not None
        gates = silu(linear(FFN.gate, normed))
        return gates, linear(FFN.down, gates * linear(FFN.up, normed))

    gates, reached = parts(narrow)
    _, target = parts(dense)
    if dense_states is not None:
        target = 0.75 * target + 0.25 * (dense_states[::2].flatten(0, 1).numpy() - h)
    lost = target - reached
    read_by_up = normed if low_rank is None else normed @ low_rank.numpy().astype(DOUBLE).T
    design = np.einsum("oj,tj,ta->toja", down.numpy().astype(DOUBLE), gates, read_by_up).reshape(lost.size, -1)
    best = np.linalg.lstsq(design, lost.ravel(), rcond=None)[0]

    def error(solution: np.ndarray[Any, Any]) -> float:
        return float(np.linalg.norm(lost.ravel() - design @ solution.ravel()))

    assert error(step(50)) == pytest.approx(error(best), rel=1e-3)
    errors = [float(np.linalg.norm(lost)), error(step(1)), error(step(2)), error(step(8))]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize(
    ("mlp_bias", "settings"),
    [
        (False, {}),
        (True, {}),
        (False, {"form": "per-layer", "ranks": "sensitivity", "embedding": "none", "sparsity": 0.25, "round_to": 4}),
    ],
)
def test_the_error_on_the_text_that_was_read_falls(
    mlp_bias: bool, settings: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_checkpoint(layers=3, mlp_bias=mlp_bias)
    errors: list[list[float | None]] = []
    for steps in (0, 3):
        output = str(tmp_path / str(steps))
        config = make_config(folder, output=output, up_steps=steps, correction="same-layer", **settings)
        report = compress(config)
        assert report.method["up_steps"] == steps
        assert ("ranks" in settings) == any(layer["up_rank"] is not None for layer in report.plan["layers"])
        errors.append([layer.sublayers[-1].measured_error for layer in report.layers])
    assert all(
        corrected is not None and plain is not None and corrected < plain
        for plain, corrected in zip(errors[0], errors[1], strict=True)
    )


@pytest.mark.parametrize("settings", [{"correction": "none"}, {"recipe": "tcsp"}, {"recipe": "flap"}], ids=str)
def test_methods_without_a_place_for_it_are_refused(
    settings: dict[str, str], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(OneshotError, match="--up-steps needs"):
        compress(make_config(make_checkpoint(), up_steps=2, **settings))


def test_an_ffn_without_a_gate_is_refused(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
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
