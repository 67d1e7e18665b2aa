"""A whole run with few tokens for a neuron: its first FFN against shrunk normal equations in float64."""

from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens

from oneshot.compression.correction import SHRINKAGES
from oneshot.pipeline import compress

DAMPING, WIDTH = 0.03, 64


@pytest.mark.parametrize(("num_sequences", "shares"), [(8, SHRINKAGES[1:]), (32, SHRINKAGES[:1])])
@torch.inference_mode()
def test_the_first_ffn_solves_shrunk_least_squares_if_tokens_are_few(
    num_sequences: int, shares: tuple[float, ...], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """With 4 tokens for a neuron some share is taken for chance, with 16 nothing."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(width=WIDTH)
    config = make_config(folder, sparsity=0.1, num_sequences=num_sequences, correction="same-layer", damping=DAMPING)
    compress(config)
    dense, result = (AutoModelForCausalLM.from_pretrained(place) for place in (folder, Path(config.output)))
    old, new = (model.model.layers[0].mlp for model in (dense, result))
    kept: list[torch.Tensor] = []
    old.down_proj.register_forward_hook(lambda _, inputs, __: kept.append(inputs[0].flatten(0, 1).double()))
    token_ids = calibration_tokens(config)
    assert token_ids.numel() == num_sequences * 32
    dense(token_ids)
    columns = (new.up_proj.weight.unsqueeze(1) == old.up_proj.weight).all(-1).int().argmax(1)
    assert 0 < len(columns) < WIDTH
    gram, weight = kept[0].T @ kept[0], old.down_proj.weight.double()
    energies, square = gram.diagonal()[columns], gram[columns][:, columns]
    ridge = DAMPING * energies.mean() * torch.eye(len(columns), dtype=torch.float64)
    differences = []
    for share in shares:
        system = (1 - share) * square + share * energies.diag() + ridge
        lost = gram[columns] @ weight.T - square @ weight[:, columns].T
        expected = weight[:, columns] + torch.linalg.solve(system, (1 - share) * lost).T
        differences.append(float((new.down_proj.weight - expected).norm() / expected.norm()))
    assert min(differences) < 1e-4
    assert sum(difference < 1e-4 for difference in differences) == 1
