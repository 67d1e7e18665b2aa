"""Rounding to ggml's types with error feedback, beside an update by inverses in float64, and in a whole file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model, calibration_tokens

pytest.importorskip("libgguf", reason="the extra `quantise`")
from oneshot.compression.rounding import DAMPING, TOKENS_PER_COLUMN
from oneshot.compression.statistics import GramAccumulator, Statistics
from oneshot.errors import PlanError
from oneshot.evaluation import load_model
from oneshot.export import open_folder
from oneshot.export.gguf_result import RestoredModel
from oneshot.export.quantisers import block_of, quantise, read_rows, rounded, usable_importance
from oneshot.export.rounded_tensors import block_factor, rounded_with_feedback
from oneshot.pipeline import compress

KINDS = ("Q8_0", "Q4_0", "IQ4_NL", "Q4_K", "IQ3_S", "Q2_K")
TOKENS = 3000


def correlated(size: int, tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    """Inputs `(tokens, size)` that share an eighth of their directions, with columns of different energy."""
    mixed = torch.randn(size // 8, size, generator=torch.Generator().manual_seed(1))
    own = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, size // 8, generator=own) @ mixed + torch.randn(tokens, size, generator=own)
    return rows * torch.linspace(0.3, 3, size)


def sums(rows: torch.Tensor) -> Statistics:
    accumulator = GramAccumulator(rows.shape[1], output_size=None, device=rows.device)
    accumulator.update_(rows)
    return accumulator.finish()


def by_inverses(weight: torch.Tensor, statistics: Statistics, kind: str) -> torch.Tensor:
    """Round block by block; what is left goes to all others by the inverse of their own Gram, made anew each time."""
    gram, size = statistics.gram.double(), block_of(kind)
    alone = torch.diag(gram.diagonal())
    trusted = TOKENS / (TOKENS + TOKENS_PER_COLUMN * len(gram))
    gram = alone + trusted * (gram - alone) + DAMPING * gram.diagonal().mean() * torch.eye(len(gram))
    left, stored = weight.double(), torch.zeros_like(weight)
    energies = statistics.gram.diagonal().unflatten(0, (-1, size)).sum(1)
    remaining = [torch.arange(size) + size * block for block in energies.argsort(descending=True).tolist()]
    while remaining:
        block, columns = remaining[0], torch.cat(remaining)
        inverse = gram[columns][:, columns].inverse()
        own = inverse[:size, :size].inverse()  # what errors of this block cost if the others make up for them
        values = left[:, block].float().numpy()
        stored[:, block] = torch.from_numpy(rounded(values, kind, own.diagonal().float().numpy()))
        step = (left[:, block] - stored[:, block]) @ own
        left[:, columns] -= step @ inverse[:size]
        remaining.pop(0)
    return stored


@pytest.mark.parametrize("kind", KINDS)
def test_feedback_is_the_update_by_inverses(kind: str) -> None:
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(2))
    statistics = sums(correlated(512))
    stored = rounded_with_feedback(weight, kind, block_factor(statistics, block_of(kind)))
    found = torch.from_numpy(read_rows(stored, kind, 512))
    expected = by_inverses(weight, statistics, kind)
    # numbers differ in their last bits; a value between two levels may fall to the other one, which moves its row
    same = torch.isclose(found, expected, rtol=1e-4, atol=1e-5)
    assert same.double().mean() > 0.8
    lost, by_reference = (sum_of_squares(weight - one, statistics) for one in (found, expected))
    assert lost == pytest.approx(by_reference, rel=0.01)


def sum_of_squares(errors: torch.Tensor, statistics: Statistics) -> float:
    return float(((errors.double() @ statistics.gram.double()) * errors).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_feedback_loses_less_on_other_tokens(kind: str) -> None:
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(2))
    statistics, others = sums(correlated(512)), sums(correlated(512, seed=5))
    stored = rounded_with_feedback(weight, kind, block_factor(statistics, block_of(kind)))
    nearest = rounded(weight.numpy(), kind, statistics.gram.diagonal().numpy())
    lost, by_nearest = (
        sum_of_squares(weight - torch.from_numpy(read), others) for read in (read_rows(stored, kind, 512), nearest)
    )
    assert lost < 0.8 * by_nearest


def test_a_linear_that_no_token_reaches_is_rounded_to_the_nearest() -> None:
    weight = torch.randn(8, 64)
    factor = block_factor(sums(torch.zeros(10, 64)), 32)
    assert factor is None
    np.testing.assert_array_equal(rounded_with_feedback(weight, "Q4_0", factor), quantise(weight.numpy(), "Q4_0", None))


@pytest.mark.parametrize("kind", ["IQ3_S", "Q2_K"])
def test_a_huge_token_among_few_does_no_harm(kind: str) -> None:
    """Rows that lose more by feedback than by rounding to the nearest, by what is known, are rounded to the nearest."""
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(2))
    rows = correlated(512, 16)
    rows[:, 7] *= 1e4
    rows[:, 300] = rows[:, 7] + 0.01 * rows[:, 300]
    rows[0] *= 1e4
    statistics = sums(rows)
    share = 16 / (16 + TOKENS_PER_COLUMN * 512)
    gram = statistics.gram.double()
    known = torch.diag(gram.diagonal()) * (1 - share) + share * gram
    factor = block_factor(statistics, block_of(kind))
    assert factor is not None
    fed_back, found = (
        read_rows(rounded_with_feedback(weight, kind, one), kind, 512) for one in (replace(factor, few=None), factor)
    )
    nearest = rounded(weight.numpy(), kind, usable_importance(statistics.gram.diagonal().numpy()))
    errors = [weight.double() - torch.from_numpy(one) for one in (fed_back, nearest, found)]
    by_feedback, by_nearest, lost = ((one @ known * one).sum(1) for one in errors)
    assert (by_feedback > 1.01 * by_nearest).any()
    assert (lost <= 1.001 * torch.minimum(by_feedback, by_nearest)).all()


@pytest.mark.parametrize("sparsity", [0.0, 0.2])
def test_layers_are_rounded_on_what_the_file_gives(
    sparsity: float, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Of the last layer's readers, whose inputs are measured on the finished file here."""
    folder = make_checkpoint(hidden=64, width=96, layers=2)
    options: dict[str, Any] = {"form": "gguf", "sparsity": sparsity, "embedding": "none", "round_to": 32}
    whole = make_config(folder, output=str(tmp_path / "whole"), **options)
    small = make_config(folder, output=str(tmp_path / "small"), bits=5.2, **options)
    compress(whole)
    compress(small)
    before, after = (RestoredModel(Path(each.output) / "model.gguf") for each in (whole, small))
    model = load_model(open_folder(small.output, tmp_path), device=torch.device("cpu"), dtype=torch.float32)
    kinds = dict(line.split("=") for line in (Path(small.output) / "tensor-types.txt").read_text().splitlines())
    queries = model.get_submodule("model.layers.1.self_attn.q_proj")
    seen = GramAccumulator(queries.in_features, output_size=None, device=torch.device("cpu"))
    queries.register_forward_pre_hook(lambda _, inputs: seen.update_(inputs[0].flatten(0, -2)))
    with torch.inference_mode():
        model(calibration_tokens(small))
    statistics = seen.finish()
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        module = f"model.layers.1.{name}.weight"
        kind = kinds[f"^{before.name_of(module)}$".replace(".", r"\.")].upper()
        weight, stored = (source.read([module])[module] for source in (before, after))
        factor = block_factor(statistics, block_of(kind))
        expected = torch.from_numpy(read_rows(rounded_with_feedback(weight, kind, factor), kind, weight.shape[1]))
        torch.testing.assert_close(stored, expected, rtol=1e-4, atol=1e-5)
        assert 0.01 < float((stored - weight).norm() / weight.norm()) < 0.2


@pytest.mark.parametrize("tied", [True, False], ids=("tied", "a head of its own"))
def test_an_output_head_is_rounded_with_feedback(
    tied: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """By what it reads, which is measured here on the whole model."""
    folder = make_checkpoint(hidden=64, width=96, tied=tied)
    options: dict[str, Any] = {"form": "gguf", "sparsity": 0.0, "embedding": "none", "num_sequences": 64}
    whole = make_config(folder, output=str(tmp_path / "whole"), **options)
    small = make_config(folder, output=str(tmp_path / "small"), bits=5.2, **options)
    compress(whole)
    compress(small)
    before, after = (RestoredModel(Path(each.output) / "model.gguf") for each in (whole, small))
    model = load_model(open_folder(whole.output, tmp_path), device=torch.device("cpu"), dtype=torch.float32)
    seen = GramAccumulator(64, output_size=None, device=torch.device("cpu"))
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.update_(inputs[0].flatten(0, -2)))
    with torch.inference_mode():
        model(calibration_tokens(small))
    statistics = seen.finish()
    name = "model.embed_tokens" if tied else "lm_head"
    kinds = dict(line.split("=") for line in (Path(small.output) / "tensor-types.txt").read_text().splitlines())
    kind = kinds[f"^{before.name_of(f'{name}.weight')}$".replace(".", r"\.")].upper()
    weight, stored = (source.read([f"{name}.weight"])[f"{name}.weight"] for source in (before, after))
    nearest = torch.from_numpy(rounded(weight.numpy(), kind, statistics.gram.diagonal().numpy()))
    lost, by_nearest = (sum_of_squares(weight - one, statistics) for one in (stored, nearest))
    assert lost < 0.98 * by_nearest  # of random states, which have few directions in common
    if not tied:
        found = rounded_with_feedback(weight, kind, block_factor(statistics, block_of(kind)))
        torch.testing.assert_close(stored, torch.from_numpy(read_rows(found, kind, 64)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [65, 96], ids=("F16", "blocks"))
@pytest.mark.parametrize(
    ("factors", "sentence"),
    [
        ({"down_proj": 1e8, "up_proj": 1e-8}, r"layers\.1\.mlp\.\w+_proj are up to"),
        (
            {"down_proj": 1e-9, "up_proj": 1e6, "gate_proj": 1e3},
            r"keeps half of what the weights of model\.layers\.1\.mlp\.down_proj do",
        ),
    ],
    ids=("beyond", "below"),
)
def test_weights_that_float16_does_not_hold_are_refused(
    factors: dict[str, float],
    sentence: str,
    width: int,
    save_model: Callable[..., Path],
    make_config: MakeConfig,
) -> None:
    """They were written as infinite or as zeros, or no type was found for them."""
    model = build_model(hidden=64, width=width)
    with torch.no_grad():
        for name, factor in factors.items():
            model.model.layers[1].mlp.get_submodule(name).weight.mul_(factor)
    config = make_config(save_model(model), form="gguf", sparsity=0.0, embedding="none", bits=9.0)
    with pytest.raises(PlanError, match=sentence):
        compress(config)


def test_weights_next_to_nothing_may_be_lost(save_model: Callable[..., Path], make_config: MakeConfig) -> None:
    model = build_model(hidden=64, width=96)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-9)
    compress(make_config(save_model(model), form="gguf", sparsity=0.0, embedding="none", bits=9.0))
