"""Mixtures with dense layers, a shared expert that shrinks with the others, and a bias that chooses experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens, stored_numbers
from families.cases import CASES
from torch.nn import functional
from transformers import AutoModelForCausalLM

from oneshot.errors import PlanError
from oneshot.pipeline import compress, predict

GLM = CASES["glm4_moe"].options
FIRST = 1  # the first layer with experts


def both(folder: Path, output: str) -> tuple[Any, Any]:
    """Return the dense model and the result."""
    dense, smaller = (AutoModelForCausalLM.from_pretrained(place).eval() for place in (folder, output))
    return dense, smaller


def rows_of(part: torch.Tensor, whole: torch.Tensor) -> list[int]:
    """Return which rows of `whole` the rows of `part` are."""
    return [int((whole == row).all(1).nonzero()) for row in part]


@torch.inference_mode()
def test_the_shared_expert_is_fitted_over_all_tokens(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """Before the first mixture nothing is lost, so its down solves its own least squares with a ridge."""
    folder = make_checkpoint(**GLM)
    config = make_config(folder, intermediate_size=24, sparsity=None, num_sequences=32, batch_size=32)
    compress(config)
    dense, smaller = both(folder, config.output)
    inputs: list[torch.Tensor] = []
    old, new = (model.model.layers[FIRST].mlp.shared_experts for model in (dense, smaller))
    old.register_forward_pre_hook(lambda _, given: inputs.append(given[0].flatten(0, 1).double()))
    dense(calibration_tokens(config))
    kept = rows_of(new.gate_proj.weight, old.gate_proj.weight)
    assert kept == sorted(set(kept))
    assert len(kept) == 24
    assert torch.equal(new.up_proj.weight, old.up_proj.weight[kept])
    neurons = functional.silu(inputs[0] @ old.gate_proj.weight.double().T) * (inputs[0] @ old.up_proj.weight.double().T)
    down = old.down_proj.weight.double()
    ridge = config.method.expert_damping * neurons[:, kept].square().sum(0).mean()
    system = torch.cat((neurons[:, kept], ridge.sqrt() * torch.eye(24, dtype=torch.float64)))
    target = torch.cat((neurons @ down.T, ridge.sqrt() * down[:, kept].T))
    expected = torch.linalg.lstsq(system, target).solution.T
    torch.testing.assert_close(new.down_proj.weight.double(), expected, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(
        smaller.model.layers[0].mlp.parameters(), dense.model.layers[0].mlp.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), "a layer without experts stays as it is"


@pytest.mark.parametrize("correction", ["none", "same-layer", "two-stream"])
@pytest.mark.parametrize("neurons", [False, True])
@torch.inference_mode()
def test_whole_experts_go_with_the_bias_that_chooses_them(
    neurons: bool, correction: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**GLM)
    sizes: dict[str, Any] = {"intermediate_size": 24} if neurons else {"ffn": "none"}
    config = make_config(folder, experts="effects", num_experts=3, sparsity=None, correction=correction, **sizes)
    predicted, report = predict(config), compress(config)
    dense, smaller = both(folder, config.output)
    assert stored_numbers(smaller) == report.stored_parameters["compressed"]
    assert predicted.stored_parameters["compressed"] == report.stored_parameters["compressed"]
    for old, new in zip(dense.model.layers[FIRST:], smaller.model.layers[FIRST:], strict=True):
        kept = rows_of(new.mlp.gate.weight, old.mlp.gate.weight)
        assert torch.equal(new.mlp.gate.e_score_correction_bias, old.mlp.gate.e_score_correction_bias[kept])
        same = torch.equal(new.mlp.shared_experts.down_proj.weight, old.mlp.shared_experts.down_proj.weight)
        assert same != neurons
    if correction == "none" and not neurons:
        downs = smaller.model.layers[FIRST].mlp.experts.down_proj
        assert torch.equal(
            downs,
            dense.model.layers[FIRST].mlp.experts.down_proj[
                rows_of(smaller.model.layers[FIRST].mlp.gate.weight, dense.model.layers[FIRST].mlp.gate.weight)
            ],
        )


UNGROUPED = {"n_group": 1, "topk_group": 1}


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v2", "deepseek_v3"])
@torch.inference_mode()
def test_whole_experts_go_with_all_that_is_theirs(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Without a correction the experts that stay are the input's, biases and rows of the router included."""
    folder = make_checkpoint(**CASES[name].options | (UNGROUPED if name != "gpt_oss" else {}))
    options = {"experts": "effects", "num_experts": 3, "ffn": "none", "sparsity": None, "correction": "none"}
    config = make_config(folder, **options)
    report = compress(config)
    dense, smaller = both(folder, config.output)
    assert stored_numbers(smaller) == report.stored_parameters["compressed"]
    whole, stored = dense.state_dict(), smaller.state_dict()
    for layer in range(len(smaller.model.layers)):
        prefix = f"model.layers.{layer}.mlp."
        router = prefix + ("router.weight" if name == "gpt_oss" else "gate.weight")
        if router in stored:
            kept = rows_of(stored[router], whole[router])
            theirs = [key for key in stored if key.startswith((router.removesuffix("weight"), f"{prefix}experts."))]
            assert len(theirs) >= 3
            assert all(torch.equal(stored[key], whole[key][kept]) for key in theirs)


def test_experts_in_groups_stay(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = make_checkpoint(**GLM, **CASES["glm4_moe"].variants["groups"])
    with pytest.raises(PlanError, match="glm4_moe are in 2 groups"):
        compress(make_config(folder, experts="effects", num_experts=3, sparsity=None, ffn="none"))
