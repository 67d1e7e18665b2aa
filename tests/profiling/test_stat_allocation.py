"""STAT's expected errors, against SciPy's pivoted QR of activations hooked in the stock model, and against NumPy."""

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from factories import MakeCheckpoint, MakeConfig, profiled_tokens
from transformers import AutoModelForCausalLM

from oneshot.architecture import ModelShape
from oneshot.export.per_layer import PerLayerForm
from oneshot.families import LLAMA
from oneshot.pipeline import compress, profile
from oneshot.planning import Profile, ProfileOrigin, profiled_damages
from oneshot.recipes import RECIPES, find_recipe

HEADS, WIDTH = 4, 24


@torch.inference_mode()
def hooked(config: Any) -> list[dict[str, np.ndarray]]:
    """Return for every layer what its two writers read, in float64, and their weights."""
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint, dtype=torch.float32).eval()
    layers: list[dict[str, np.ndarray]] = []
    for layer in model.model.layers:
        seen: dict[str, np.ndarray] = {}
        for name, linear in (("heads", layer.self_attn.o_proj), ("ffn", layer.mlp.down_proj)):
            seen[f"{name} weight"] = linear.weight.double().numpy()

            def keep(_: Any, inputs: Any, name: str = name, seen: dict[str, np.ndarray] = seen) -> None:
                seen[name] = inputs[0].flatten(0, -2).double().numpy()

            linear.register_forward_pre_hook(keep)
        layers.append(seen)
    model(profiled_tokens(config)[0], use_cache=False)
    return layers


def tail_norms(factor: np.ndarray) -> list[float]:
    """Return `‖R[k:, k:]‖_F` for every k."""
    return [float(np.linalg.norm(factor[size:, size:])) for size in range(factor.shape[1] + 1)]


def test_tails_are_those_of_pivoted_qr_of_the_weighted_activations(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(make_checkpoint(width=WIDTH, heads=HEADS, groups=HEADS), output=str(tmp_path / "profile"))
    found = profile(config)
    for layer, seen in enumerate(hooked(config)):
        neurons = seen["ffn"] * np.linalg.norm(seen["ffn weight"], axis=0)
        factor, _ = scipy.linalg.qr(neurons, mode="r", pivoting=True)
        np.testing.assert_allclose(found.ffn_tails[layer], tail_norms(factor), rtol=2e-3, atol=1e-2)

        weighted = seen["heads"] * np.linalg.norm(seen["heads weight"], axis=0)
        per_head = weighted.reshape(len(weighted), HEADS, -1)
        _, pivots = scipy.linalg.qr(per_head.transpose(0, 2, 1).reshape(-1, HEADS), mode="r", pivoting=True)
        tails = []
        for kept in range(HEADS + 1):
            heads = [*np.sort(pivots[:kept]), *np.sort(pivots[kept:])]
            columns = per_head[:, heads].reshape(len(weighted), -1)
            tails.append(tail_norms(np.linalg.qr(columns, mode="r"))[kept * per_head.shape[2]])
        np.testing.assert_allclose(found.head_tails[layer], tails, rtol=2e-3, atol=1e-2)


def curves(layers: int, width: int, units: int) -> Profile:
    generator = np.random.default_rng(0)
    tensors = {field.name: torch.zeros(layers, dtype=torch.float64) for field in fields(Profile)}
    del tensors["origin"]
    for name, size in (("ffn_tails", width), ("head_tails", units)):
        falling = np.sort(generator.random((layers, size)), axis=1)[:, ::-1] * 10
        tensors[name] = torch.from_numpy(np.concatenate((falling, np.zeros((layers, 1))), axis=1))
    return Profile(origin=ProfileOrigin("", "", "", "query-head", 0.0, 1, {}), **tensors)


@pytest.mark.parametrize("allocation", ["stat", "stat-reversed"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_expected_errors_are_the_papers(place: Any, allocation: Any) -> None:
    """F · w(l) · e of STAT section 3.3 and appendix A.4, for norms before and after the sublayers."""
    shape = ModelShape(3, 8, 12, 4, 2, 4, vocab_size=80)
    no_norms = {"before": None, "after": None}
    sublayers = tuple(replace(part, **no_norms | {place: part.norm}) for part in LLAMA.stack.sublayers)
    family = replace(LLAMA, stack=replace(LLAMA.stack, sublayers=sublayers))
    model: Any = SimpleNamespace(family=family, shape=shape)
    given = curves(3, 12, 2)
    found = profiled_damages(given, allocation, PerLayerForm().grid(model))
    attention, ffn = 2 * 8 * (4 + 2) * 4, 3 * 8 * 12  # multiply-adds of a token: queries and output, keys and values
    for kind, share in (("ffn", ffn), ("head", attention)):
        tails = getattr(given, f"{kind}_tails").numpy()
        for layer in range(3):
            number = layer + 1
            weight = np.sqrt(number + 1) + 1 if place == "after" else number + 50
            error = tails[layer] if place == "after" else tails[layer] / tails[layer, 0]
            expected = share / (attention + ffn) * error * (weight if allocation == "stat" else 1 / weight)
            damages = found["ffn" if kind == "ffn" else "heads"]
            np.testing.assert_allclose(damages[layer], expected, rtol=1e-12)


def test_the_recipe_stat_is_stat() -> None:
    stat = find_recipe("stat")
    assert (stat.ffn, stat.heads, stat.correction) == ("id", "id", "two-stream")
    assert (stat.residual_target, stat.residual_weight, stat.damping) == ("sublayer", 1.0, 1e-6)
    assert (stat.pivoting, stat.sketch) == ("grouped", "count")
    unchanged = RECIPES["oneshot"]
    assert (unchanged.residual_target, unchanged.residual_weight, unchanged.damping) == ("stream", 0.25, 3e-2)


@pytest.mark.parametrize("form", ["per-layer", "nemotron-nas", "stock"])
def test_the_recipe_stat_shares_out_by_its_own_formula(
    form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(layers=3), recipe="stat", form=form, num_sequences=32)
    report = compress(config)
    assert report.method["allocation"] == ("uniform" if form == "stock" else "stat")
    written = json.loads((Path(config.output) / "oneshot_report.json").read_text())
    assert written["method"]["residual_target"] == "sublayer"
