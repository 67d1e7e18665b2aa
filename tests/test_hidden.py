"""The smaller hidden size: exact at full width, honest about its error, stock in every family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from hypothesis import given
from hypothesis import strategies as st

from oneshot import OneshotError, compress
from oneshot.calibration import load_calibration, load_tokenizer
from oneshot.hidden import project_model
from oneshot.linalg.pca import principal_subspace
from oneshot.source import open_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tied": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "mistral-tied": {"family": "mistral", "tied": True},
    "qwen2": {"family": "qwen2"},
    "qwen3-tied": {"family": "qwen3", "tied": True, "head_dim": 8},
}
TOKEN_IDS = torch.randint(0, 400, (2, 24), generator=torch.Generator().manual_seed(1))


def random_basis(size: int, kept: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, kept, dtype=torch.float64, generator=generator))[0]


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder).double().eval()(TOKEN_IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotation_at_full_width_changes_nothing(family: str, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint(**FAMILIES[family])
    project_model(open_model(str(folder), tmp_path), random_basis(32, 32), tmp_path / "turned", max_shard_bytes=20_000)
    wanted = logits(folder)
    torch.testing.assert_close(logits(tmp_path / "turned"), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def test_directions_that_the_model_never_uses_cost_nothing(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A model that lives in 24 of 32 dimensions is the same model there, its norms' widths and eps included."""
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(family="mistral", tied=True)
    basis = random_basis(32, 24)
    inside = tmp_path / "inside"
    project_model(open_model(str(folder), tmp_path), random_basis(32, 32), inside, max_shard_bytes=10**9)
    (path,) = inside.glob("*.safetensors")
    tensors = load_file(path)
    span = (basis @ basis.T).float()
    for name in tensors:
        if name.endswith(("embed_tokens.weight",)):
            tensors[name] = tensors[name] @ span
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = span @ tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    project_model(open_model(str(inside), tmp_path), basis, tmp_path / "narrow", max_shard_bytes=10**9)
    wanted = logits(inside)
    torch.testing.assert_close(logits(tmp_path / "narrow"), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    narrow, wide = open_model(str(tmp_path / "narrow"), tmp_path), open_model(str(inside), tmp_path)
    assert narrow.shape == replace(wide.shape, hidden_size=24)


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_subspace_is_that_of_the_singular_vectors(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, 12, dtype=torch.float64, generator=generator) * torch.logspace(0, -3, 12)
    subspace = principal_subspace(rows.T @ rows, size)
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    torch.testing.assert_close(subspace.basis @ subspace.basis.T, vectors[:size].T @ vectors[:size], rtol=0, atol=1e-6)
    tail = values[size:].square().sum() / values.square().sum()
    assert subspace.relative_error == pytest.approx(float(tail.sqrt()), abs=1e-7)
    projected = rows - rows @ subspace.basis @ subspace.basis.T
    assert float(projected.norm() / rows.norm()) == pytest.approx(subspace.relative_error, abs=1e-7)


def test_the_error_reported_is_that_of_what_the_norms_see(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Against hooks on the stock model and an SVD of the rows themselves."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(family="mistral")
    config = make_config(folder, recipe="tcsp", sparsity=0.2)
    report = compress(config)
    seen: list[torch.Tensor] = []
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for name, module in model.named_modules():
        if name.endswith(("layernorm", "model.norm")):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2).double()))
    calibration = load_calibration(
        config.calibration,
        load_tokenizer(folder),
        num_sequences=config.num_sequences,
        sequence_length=config.sequence_length,
        seed=config.seed,
    )
    with torch.inference_mode():
        model(calibration.token_ids)
    rows = torch.cat(seen)
    energies = torch.linalg.svdvals(rows / rows.norm(dim=1, keepdim=True)).square()
    tail = energies[report.compressed_shape["hidden_size"] :].sum() / energies.sum()
    assert report.hidden_error == pytest.approx(float(tail.sqrt()), rel=1e-3)


def test_hidden_size_and_ffn_together(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(family="qwen3", head_dim=8)
    config = make_config(folder, hidden="pca", hidden_size=28, sparsity=0.25)
    report = compress(config)
    model = AutoModelForCausalLM.from_pretrained(config.output)
    assert model.config.hidden_size == 28
    assert model.config.intermediate_size < 64
    assert sum(parameter.numel() for parameter in model.parameters()) == report.stored_parameters["compressed"]
    assert report.sparsity["reached"] == pytest.approx(0.25, abs=0.02)
    assert torch.isfinite(model(TOKEN_IDS).logits).all()


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"attention_bias": True}, {"recipe": "tcsp", "sparsity": 0.05}, "No stock config"),
        ({}, {"hidden_size": 28, "sparsity": 0.1}, "--hidden pca"),
        ({}, {"hidden": "pca", "sparsity": 0.1}, "--hidden-size"),
        ({}, {"recipe": "tcsp", "hidden_size": 28, "sparsity": 0.1}, "--hidden-size"),
        ({}, {"hidden": "pca", "hidden_size": 32, "sparsity": 0.1}, "not below"),
        ({}, {"hidden": "pca", "hidden_size": 8, "sparsity": 0.1}, "give a larger one"),
        ({"tied": True}, {"recipe": "tcsp", "sparsity": 0.95}, "hidden size alone"),
        ({}, {"recipe": "tcsp", "sparsity": 0.1, "round_to": 64}, "--round-to"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    options: dict[str, Any],
    changes: dict[str, Any],
    words: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    config = make_config(make_checkpoint(**options), **changes)
    with pytest.raises(OneshotError, match=words):
        compress(config)
    assert not Path(config.output).exists()
