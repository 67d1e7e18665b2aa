"""The correction of a writer before the norm of its branch, against float64 and against whole runs of Gemma 3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model, calibration_tokens
from families.cases import CASES, variants
from last_states import assert_passes, keep_last_states

from oneshot.compression.branch_norm import BranchNorm, at_scaled
from oneshot.evaluation import load_model
from oneshot.families import FAMILIES
from oneshot.pipeline import compress

DAMPING = 5e-4  # so small that held-out tokens do not say how much is corrected
OPTIONS = CASES["gemma3_text"].options


def seeded(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def branch_norm(weight: torch.Tensor) -> BranchNorm:
    sublayer = FAMILIES["gemma3_text"].stack.sublayers[1]
    assert sublayer.inside is not None
    found = BranchNorm.of(sublayer, {f"{sublayer.inside.name}.weight": weight}, torch.device("cpu"))
    assert found is not None
    return found


def normed(written: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return gain * written / (written.square().mean(1, keepdim=True) + 1e-6).sqrt()


def test_tokens_count_by_the_inverse_of_their_root_mean_square() -> None:
    weight, written = 0.3 * seeded(32), seeded(5, 32) * torch.tensor([[1e-4], [0.1], [1.0], [30.0], [0.0]])
    scales = branch_norm(weight).scales(written, normed(written, 1 + weight))
    expected = (written.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(scales[:4], expected[:4], rtol=1e-4, atol=0)
    assert scales[4] == 0, "a token whose output is zero says nothing"


def test_a_residual_is_taken_back_through_the_norm_to_first_order() -> None:
    """With equal gains the change of the output moves the stream along the residual, but for its radial part."""
    gain, written, residual = torch.full((32,), 1.5), seeded(6, 32).double(), 1e-4 * seeded(32).expand(6, 32).double()
    lost = branch_norm(gain - 1).taken_back(residual, written)
    scale = (written.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    change = lost / gain / scale  # of the output itself: the rows lost are seen through the gain, and weigh `s`
    moved = normed(written + change, gain) - normed(written, gain)
    direction = written / written.norm(dim=1, keepdim=True)
    tangent = residual - direction * (direction * residual).sum(1, keepdim=True)
    torch.testing.assert_close(moved * 1.1, tangent, rtol=0, atol=1e-6)  # SOFT_GAIN takes an eleventh


def test_a_row_without_gain_keeps_its_solution() -> None:
    norm, weight = branch_norm(torch.tensor([-1.0, 0.0, 0.5])), seeded(3, 4).double()
    torch.testing.assert_close(norm.unseen(norm.seen(weight)), weight)


@pytest.mark.parametrize("form", ["stock", "per-layer"])
@pytest.mark.parametrize("family", ["exaone4", "gemma2", "glm4", "gemma4_text-experts"])
@torch.inference_mode()
def test_branches_whose_norms_have_no_gain_at_all(
    family: str, form: str, make_config: MakeConfig, save_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that adds nothing, as one that is new in a deeper model; the result computes what the run has passed."""
    model = build_model(**variants()[family])
    norms = [one.inside for one in FAMILIES[model.config.model_type].stack.sublayers if one.inside is not None]
    for name, weight in model.model.layers[1].named_parameters():
        if name.startswith("post_"):
            torch.nn.init.constant_(weight, -norms[0].offset)
    config, last = make_config(save_model(model), form=form, sparsity=0.1), keep_last_states(monkeypatch)
    compress(config)
    result = load_model(Path(config.output), device=torch.device("cpu"), dtype=torch.float32)
    assert_passes(result, "model.layers", config, last[0])


def test_a_curvature_of_the_output_is_one_of_what_the_stream_sees() -> None:
    norm, weight, rows = branch_norm(torch.tensor([-1.0, 0.0, 0.5])), seeded(3, 4).double(), seeded(9, 3).double()
    curvature, seen = rows.T @ rows, norm.seen(weight)
    found = seen.T @ norm.curvature_of_seen(curvature.float()) @ seen
    torch.testing.assert_close(found, weight.T @ curvature @ weight, rtol=1e-5, atol=1e-6)


def test_gradients_by_scaled_outputs_of_tokens_are_those_of_autograd() -> None:
    scales, written = torch.tensor([[4.0], [0.5], [0.0]]), seeded(3, 5).requires_grad_()
    scaled = scales * written
    [at_written, expected] = torch.autograd.grad(scaled.square().sum(), [written, scaled])
    found = at_scaled(at_written, scales)
    torch.testing.assert_close(found, expected)
    assert not found[2].any()


@pytest.mark.parametrize("heads", ["none", "id"])
@torch.inference_mode()
def test_the_writers_of_gemma_solve_weighted_least_squares(
    heads: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """The first layer's FFN, or its attention, against normal equations in float64 over weighted tokens."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(**OPTIONS)
    ffn = "id" if heads == "none" else "none"
    config = make_config(
        folder,
        heads=heads,
        ffn=ffn,
        sparsity=0.05,
        correction="same-layer",
        damping=DAMPING,
    )
    compress(config)
    stock = build_model(**OPTIONS)
    first = stock.model.layers[0]
    writer, norm = (first.mlp.down_proj, first.post_feedforward_layernorm)
    if heads == "id":
        writer, norm = (first.self_attn.o_proj, first.post_attention_layernorm)
    kept: list[torch.Tensor] = []
    writer.register_forward_hook(lambda _, inputs, output: kept.extend((inputs[0], output)))
    stock(calibration_tokens(config))
    inner, written = (rows.flatten(0, 1).double() for rows in kept)
    weighted = inner * (written.square().mean(1, keepdim=True) + norm.eps).rsqrt()
    result = AutoModelForCausalLM.from_pretrained(Path(config.output)).model.layers[0]
    if heads == "none":
        same = (result.mlp.up_proj.weight.unsqueeze(1) == first.mlp.up_proj.weight).all(-1)
        found = result.mlp.down_proj.weight
    else:
        same = (result.self_attn.q_proj.weight.unsqueeze(1) == first.self_attn.q_proj.weight).all(-1)
        found = result.self_attn.o_proj.weight
    columns = same.int().argmax(1)
    gram, dense = weighted.T @ weighted, writer.weight.double()
    damping = DAMPING * max(1.0, 16 * weighted.shape[1] / len(weighted))  # more where a column has few tokens
    ridge = damping * gram.diagonal()[columns].mean() * torch.eye(len(columns), dtype=torch.float64)
    expected = torch.linalg.solve(
        gram[columns][:, columns] + ridge, gram[columns] @ dense.T + ridge @ dense[:, columns].T
    ).T
    assert len(columns) < dense.shape[1]
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
