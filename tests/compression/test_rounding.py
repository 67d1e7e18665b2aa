"""Rounding with error feedback, beside GPTQ's own update in float64, and beside rounding to the nearest."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("compressed_tensors", reason="the extra `compressed`")
from oneshot.checkpoint.quantisation import PRESETS, Quantisation
from oneshot.compression.ranks import Factored
from oneshot.compression.rounding import (
    DAMPING,
    TOKENS_PER_COLUMN,
    Rounded,
    columns_to_round,
    order_for_groups,
    round_linears,
    rounded,
)

TOKENS = 200
GROUPS = {"w4a16": 16, "nvfp4": 16, "mxfp4": 32}
W8A8 = Quantisation("w8a8", 0, torch.bfloat16)
SCHEMES = [Quantisation(name, GROUPS.get(name, 0), torch.bfloat16) for name in PRESETS]


@pytest.fixture
def inputs() -> torch.Tensor:
    """Correlated inputs `(tokens, 32)`, with columns of very different energy."""
    mixed = torch.randn(TOKENS, 32, dtype=torch.float64) @ torch.randn(32, 32, dtype=torch.float64)
    return mixed * torch.linspace(0.3, 3, 32, dtype=torch.float64)


def by_gptq(weight: torch.Tensor, gram: torch.Tensor, scheme: Quantisation, scales: torch.Tensor) -> torch.Tensor:
    """Round column by column; what is left goes to all others by the inverse of their own Gram, made anew each time."""
    alone = torch.diag(gram.diagonal())
    trusted = TOKENS / (TOKENS + TOKENS_PER_COLUMN * len(gram))
    gram = alone + trusted * (gram - alone) + DAMPING * alone.diagonal().mean() * torch.eye(len(gram))
    steps, left = scheme.steps(scales).expand(weight.shape), weight.clone()
    stored = torch.zeros_like(weight)
    order = gram.diagonal().argsort(descending=True, stable=True).tolist()
    for at, column in enumerate(order):
        stored[:, column] = scheme.nearest(left[:, column], steps[:, column])
        open_columns = order[at:]
        inverse = gram[open_columns][:, open_columns].inverse()
        step = (left[:, column] - stored[:, column]) / inverse[0, 0]
        left[:, open_columns] -= step.unsqueeze(1) * inverse[0]
    return stored


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_rounding_is_gptqs(scheme: Quantisation, inputs: torch.Tensor) -> None:
    weight, gram = torch.randn(6, 32, dtype=torch.float64), inputs.T @ inputs
    scheme = scheme.for_weights([weight])
    found = rounded(weight, gram, TOKENS, scheme)
    feedback, nearest = by_gptq(weight, gram, scheme, found.scales), scheme.nearest(weight, scheme.steps(found.scales))
    lost, by_nearest = ((inputs @ (weight - one).T).square().sum(0) for one in (feedback, nearest))
    expected = torch.where((lost <= by_nearest).unsqueeze(1), feedback, nearest)
    assert int((lost <= by_nearest).sum()) >= 4
    torch.testing.assert_close(found.weight, expected, rtol=1e-12, atol=0)
    lost, whole = ((inputs @ one.T).square().sum(0) for one in (weight - found.weight, weight))
    torch.testing.assert_close(found.energies, torch.stack((lost, whole), dim=1))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_feedback_loses_less_than_the_nearest(scheme: Quantisation, inputs: torch.Tensor) -> None:
    weight, gram = torch.randn(64, 32, dtype=torch.float64), inputs.T @ inputs
    scheme = scheme.for_weights([weight])
    found = rounded(weight, gram, TOKENS, scheme)
    nearest = scheme.nearest(weight, scheme.steps(found.scales))
    lost, by_nearest = ((inputs @ (weight - one).T).square().sum(0) for one in (found.weight, nearest))
    assert lost.sum() < 0.8 * by_nearest.sum()
    assert bool((lost <= 1.000001 * by_nearest).all())


def test_few_tokens_are_not_fitted() -> None:
    """Inputs without correlations: products of a few tokens are chance, by which feedback would lose on others."""
    scheme, weight = SCHEMES[0], torch.randn(64, 64, dtype=torch.float64)
    few, others = torch.randn(2, 80, 64, dtype=torch.float64)
    found = rounded(weight, few.T @ few, len(few), scheme)
    trusting = rounded(weight, few.T @ few, 1e9, scheme)
    lost, by_trust = ((others @ (weight - one.weight).T).square().sum() for one in (found, trusting))
    assert lost < 0.8 * by_trust


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_numbers_are_read_as_the_rounded_weight(
    scheme: Quantisation, dtype: torch.dtype, inputs: torch.Tensor
) -> None:
    from compressed_tensors.compressors import BaseCompressor

    weight = torch.randn(40, 32).to(dtype)
    found = rounded(weight, inputs.T @ inputs, TOKENS, scheme.for_weights([weight]))
    scheme = scheme.for_scales([found.scales])
    stored = {name.rpartition(".")[2]: one for name, one in scheme.packed("q", found.weight, found.scales).items()}
    assert sum(one.nbytes for one in stored.values()) == scheme.linear_bytes(40, 32)
    compressor = BaseCompressor.get_value_from_registry(scheme.scheme.format.value)
    exact = stored | ({"weight_scale": stored["weight_scale"].float()} if scheme.name not in ("nvfp4", "mxfp4") else {})
    assert torch.equal(compressor.decompress(exact, scheme.scheme)["weight"].to(dtype), found.weight)


def low_rank() -> tuple[torch.Tensor, Factored]:
    """A matrix `(80, 32)` of rank 16, and its factors."""
    factored = Factored(torch.randn(80, 16, dtype=torch.float64), torch.randn(16, 32, dtype=torch.float64))
    return factored.whole(torch.float64), factored


@pytest.mark.parametrize("scheme", SCHEMES[:1] + SCHEMES[3:4], ids=lambda scheme: scheme.name)
def test_what_a_low_rank_reads_through_is_fitted_to_its_rounded_columns(
    scheme: Quantisation, inputs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, factored = low_rank()
    mixer: Any = SimpleNamespace(ranked={"gate": ("gate",)})
    weights = {"gate.weight": whole}

    def lost() -> tuple[float, Rounded]:
        found = round_linears(mixer, ["gate"], weights, {"gate": factored}, inputs.T @ inputs, TOKENS, scheme)
        errors = inputs @ (whole - found.ranks["gate"].whole(torch.float64)).T
        return float(errors.square().sum() / (inputs @ whole.T).square().sum()) ** 0.5, found

    fitted, found = lost()
    assert found.errors["gate"] == pytest.approx(fitted, rel=1e-9)
    columns, others, order = found.ranks["gate"].columns()
    read = torch.cat((torch.eye(16, dtype=torch.float64), others.T), dim=1)[:, order.argsort()]
    torch.testing.assert_close(columns @ read, found.ranks["gate"].whole(torch.float64))
    of_scheme = scheme.for_scales([found.scales["gate.weight"]])
    of_scheme.packed("gate", columns.bfloat16(), found.scales["gate.weight"])  # which says if they cannot be stored
    dead = round_linears(mixer, ["gate"], weights, {"gate": factored}, torch.zeros(32, 32), TOKENS, scheme)
    assert bool(dead.ranks["gate"].whole(torch.float64).isfinite().all())  # no token has reached it
    monkeypatch.setattr("oneshot.compression.rounding._better_inputs", lambda columns, made, *_: made)
    assert fitted < 0.9 * lost()[0]


def test_the_error_of_a_low_rank_is_known_where_inputs_have_a_large_mean() -> None:
    """Eight bits lose a millionth of the outputs' energy there, and factors are float32."""
    inputs = torch.randn(TOKENS, 64, dtype=torch.float64) + 20 * torch.randn(64, dtype=torch.float64)
    factored = Factored(torch.randn(80, 16), torch.randn(16, 64))
    whole = factored.outputs.double() @ factored.inputs.double()
    mixer: Any = SimpleNamespace(ranked={"gate": ("gate",)})
    gram = (inputs.T @ inputs).float()
    found = round_linears(mixer, ["gate"], {"gate.weight": whole}, {"gate": factored}, gram, TOKENS, W8A8)
    rounded_columns = found.ranks["gate"]
    errors = inputs @ (whole - rounded_columns.outputs.double() @ rounded_columns.inputs.double()).T
    lost = float(errors.square().sum() / (inputs @ whole.T).square().sum()) ** 0.5
    assert lost < 2e-3
    assert found.errors["gate"] == pytest.approx(lost, rel=0.01)


def test_the_ways_to_store_a_low_rank_are_the_same_matrix() -> None:
    whole, factored = low_rank()
    ways = columns_to_round(factored)
    assert len(ways) == 2
    for columns, others, order in ways:
        assert torch.equal(order.sort().values, torch.arange(32))
        assert bool((columns.norm(dim=0).diff() <= 0).all())
        torch.testing.assert_close(torch.cat((columns, columns @ others.T), dim=1), whole[:, order])


def test_a_low_rank_is_stored_in_columns_that_lose_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs along few directions: columns that are chosen by the inputs alone are nearly parallel."""
    inputs = torch.randn(TOKENS, 64, dtype=torch.float64) @ torch.randn(64, 64, dtype=torch.float64)
    outputs = torch.linalg.qr(torch.randn(96, 32, dtype=torch.float64)).Q
    sizes = torch.logspace(0, -2, 32, dtype=torch.float64)
    factored = Factored(outputs * sizes, torch.randn(32, 64, dtype=torch.float64))
    mixer: Any = SimpleNamespace(ranked={"gate": ("gate",)})
    weights, gram = {"gate.weight": factored.whole(torch.float64)}, inputs.T @ inputs

    def lost() -> float:
        return round_linears(mixer, ["gate"], weights, {"gate": factored}, gram, TOKENS, SCHEMES[0]).errors["gate"]

    ours = lost()
    monkeypatch.setattr("oneshot.compression.rounding.columns_to_round", lambda factored: [factored.columns()])
    assert ours < 0.95 * lost()


def test_columns_that_do_not_span_a_low_rank_are_not_taken() -> None:
    _, factored = low_rank()
    parallel = factored.inputs.clone()
    parallel[1:, :16] = 0  # the largest columns, which are parallel
    outputs = torch.zeros_like(factored.outputs)
    outputs[:, 0] = 1
    [way] = columns_to_round(Factored(outputs, parallel))
    assert all(bool(one.isfinite().all()) for one in way)


def test_columns_of_one_size_share_their_scales(inputs: torch.Tensor) -> None:
    weight = torch.randn(64, 32, dtype=torch.float64) * torch.tensor([0.2, 3.0], dtype=torch.float64).repeat(16)
    order, gram = order_for_groups(weight), inputs.T @ inputs
    lost = rounded(weight, gram, TOKENS, SCHEMES[0]).energies[:, 0].sum()
    assert rounded(weight[:, order], gram[order][:, order], TOKENS, SCHEMES[0]).energies[:, 0].sum() < 0.8 * lost


def test_scales_weigh_errors_by_the_inputs() -> None:
    """The largest weight of a group meets nothing, so the scale may cut it off for the others."""
    scheme, weight = Quantisation("w4a16", 32, torch.float32), torch.rand(8, 32) / 2
    weight[:, 0] = 1.0
    importance = torch.ones(32)
    importance[0] = 0
    assert bool((scheme.scales(weight, importance).abs() < 0.8 * scheme.scales(weight).abs()).all())
    assert torch.equal(scheme.scales(weight), scheme.scales(weight, torch.ones(32)))


def test_four_bits_have_their_eighth_step_at_either_extreme() -> None:
    """−8 to 7: groups whose largest weight is positive are stored with a negative scale, and lose as little."""
    scheme, weight = Quantisation("w4a16", 32, torch.float32), torch.randn(400, 32, dtype=torch.float64)
    scales = scheme.scales(weight)

    def lost(steps: torch.Tensor) -> torch.Tensor:
        return (scheme.nearest(weight, steps) - weight).square().sum(1)

    positive = [lost(share * weight.abs().amax(1, keepdim=True) / 7.5) for share in (1.0, 0.95, 0.9, 0.85, 0.8)]
    assert 0.3 < float((scales < 0).double().mean()) < 0.7
    assert lost(scales).mean() < 0.92 * torch.stack(positive).amin(0).mean()
    torch.testing.assert_close((scheme.nearest(-weight, scheme.scales(-weight)) + weight).square().sum(1), lost(scales))
    assert Quantisation("w8a8", 0, torch.float32).scales(weight).min() > 0


def test_linears_that_no_token_reaches_are_rounded_to_the_nearest() -> None:
    scheme, weight = Quantisation("w8a8", 0, torch.float32), torch.randn(4, 16, dtype=torch.float64)
    found = rounded(weight, torch.zeros(16, 16), 10, scheme)
    assert torch.equal(found.weight, scheme.nearest(weight, found.scales))


TINY = [("w4a16", dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("largest", [1.0, 0.0, 1e-30, 1e4])
@pytest.mark.parametrize(("name", "dtype"), [*TINY, ("nvfp4", torch.bfloat16), ("mxfp4", torch.bfloat16)])
def test_zeros_and_tiny_weights_stay_finite(name: Any, dtype: torch.dtype, largest: float) -> None:
    weight = torch.zeros(3, 32)
    weight[1], weight[2] = 1e-9, largest * torch.randn(32)
    scheme = Quantisation(name, GROUPS[name], dtype).for_weights([weight])
    found = rounded(weight, torch.eye(32), 100, scheme)
    scheme = scheme.for_scales([found.scales])
    assert bool((found.weight[0] == 0).all())
    assert bool((found.scales != 0).all())
    assert bool(found.weight.isfinite().all())
    assert all(bool(one.float().isfinite().all()) for one in scheme.packed("q", found.weight, found.scales).values())


def test_small_weights_in_float16_are_rounded_as_finely_as_others() -> None:
    """Their scales are below float16's normal numbers."""
    weight = torch.randn(16, 32)
    for name in ("w8a8", "fp8"):
        scheme = Quantisation(name, 0, torch.float16)
        lost = [
            float((rounded(size * weight, torch.eye(32), 100, scheme).weight / size - weight).norm())
            for size in (1.0, 1e-3)
        ]
        assert lost[1] < 1.2 * lost[0], name
