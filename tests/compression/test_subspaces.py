"""The smaller hidden size: exact at full width, honest about its error, in every family and both tiers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from oneshot import OneshotError, compress
from oneshot.evaluate import load_model
from oneshot.export.hf import stock_config
from oneshot.export.per_layer import per_layer_config, per_layer_shape
from oneshot.fold import fold_embedding, fold_head, fold_hidden, to_rms_norms
from oneshot.layerwise import LayerCompressor
from oneshot.linalg.pca import energies_along, principal_directions
from oneshot.plan import groups_of_positions, spread_hidden_sizes
from oneshot.records import HiddenPlan, LayerPlan, ModelShape, Plan
from oneshot.source import SourceModel, open_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tied": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "mistral-tied": {"family": "mistral", "tied": True},
    "qwen2": {"family": "qwen2"},
    "qwen3-tied": {"family": "qwen3", "tied": True, "head_dim": 8},
    "opt": {"family": "opt"},
    "opt-tied": {"family": "opt", "tied": True},
}
CPU = torch.device("cpu")
TOKEN_IDS = torch.randint(0, 400, (2, 24), generator=torch.Generator().manual_seed(1))


def random_basis(size: int, kept: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, kept, dtype=torch.float64, generator=generator))[0]


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(folder, device=CPU, dtype=torch.float32).double()(TOKEN_IDS).logits


def write_folded(
    source: SourceModel, folder: Path, group_of: tuple[int, ...], bases: list[torch.Tensor], tier: str
) -> None:
    """The whole model in the subspaces of its groups, as `compress` would write it."""
    shape, architecture, checkpoint = source.shape, source.architecture, source.checkpoint
    sizes = tuple(bases[group].shape[1] for group in group_of)
    plan = Plan(
        (LayerPlan(shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads),)
        * shape.num_hidden_layers,
        "query-head",
        hidden=HiddenPlan(group_of, sizes),
        tier=tier,
    )
    stack = plan.stack(shape)
    ends = bases[group_of[0]], bases[group_of[-1]]
    embedding, positions = checkpoint.read_one(architecture.embedding), source.read_positions()
    tensors = {"model.embed_tokens.weight": fold_embedding(embedding, ends[0], centred=shape.norm_bias)}
    if positions is not None:
        tensors["model.embed_positions.weight"] = fold_embedding(positions, ends[0], centred=True)
    tensors |= fold_head(
        embedding if shape.tied else checkpoint.read_one(architecture.output_head),
        checkpoint.read_one(f"{architecture.final_norm}.weight"),
        checkpoint.read_one(f"{architecture.final_norm}.bias") if shape.norm_bias else None,
        ends,
        keep_tied=stack.head != "own",
    )
    for layer in range(shape.num_hidden_layers):
        stored = source.read_layer(layer)
        if shape.norm_bias:
            stored = to_rms_norms(stored)
        places = group_of[2 * layer : 2 * layer + 3]
        folded = fold_hidden(stored, *(bases[group] for group in places))
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in folded.items()}
    if tier == "per-layer":
        config = per_layer_config(checkpoint.config, shape, stack)
    else:
        narrow = replace(shape, hidden_size=sizes[0])
        config = stock_config(architecture.resize_config(checkpoint.config, narrow), untied=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("tier", ["stock", "per-layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotation_at_full_width_changes_nothing(
    family: str, tier: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    if tier == "stock" and family.startswith("opt"):
        pytest.skip("a rotated OPT has RMSNorms, which its stock class has not")
    folder = make_checkpoint(**FAMILIES[family])
    source = open_model(str(folder), tmp_path)
    group_of = groups_of_positions(2, 0 if tier == "stock" else 1)
    bases = [random_basis(32, 32, seed) for seed in range(group_of[-1] + 1)]
    write_folded(source, tmp_path / "turned", group_of, bases, tier)
    wanted = logits(folder)
    torch.testing.assert_close(logits(tmp_path / "turned"), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("group_size", [0, 1, 2])
def test_directions_that_the_model_never_uses_cost_nothing(
    group_size: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A model that lives in 24 of 32 dimensions is the same model there, its norms' widths and eps included."""
    folder = make_checkpoint(family="mistral", tied=True)
    group_of = groups_of_positions(2, group_size)
    source = open_model(str(folder), tmp_path)
    inside = tmp_path / "inside"
    write_folded(source, inside, groups_of_positions(2, 0), [random_basis(32, 32)], "stock")
    path = inside / "model.safetensors"
    tensors = load_file(path)
    span = random_basis(32, 24, seed=5)
    projection = (span @ span.T).float()
    for name in tensors:
        if name.endswith("embed_tokens.weight"):
            tensors[name] = tensors[name] @ projection
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = projection @ tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    turns = [span @ random_basis(24, 24, seed) for seed in range(group_of[-1] + 1)]
    tier = "per-layer" if group_size else "stock"
    write_folded(open_model(str(inside), tmp_path), tmp_path / "narrow", group_of, turns, tier)
    wanted = logits(inside)
    torch.testing.assert_close(logits(tmp_path / "narrow"), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_subspace_is_that_of_the_singular_vectors(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, 12, dtype=torch.float64, generator=generator) * torch.logspace(0, -3, 12)
    gram = rows.T @ rows
    basis = principal_directions(gram)[:, :size]
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    torch.testing.assert_close(basis @ basis.T, vectors[:size].T @ vectors[:size], rtol=0, atol=1e-6)
    energies = energies_along(gram, basis)
    torch.testing.assert_close(energies, values[:size].square(), rtol=1e-6, atol=1e-9)
    lost = (rows - rows @ basis @ basis.T).square().sum()
    assert float(rows.square().sum() - energies.sum()) == pytest.approx(float(lost), abs=1e-7)


@pytest.mark.parametrize("recipe", ["tcsp", "group-pca"])
@pytest.mark.parametrize("family", ["mistral", "opt"])
def test_the_errors_reported_are_those_of_what_the_norms_see(
    recipe: str, family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Against hooks on the stock model and an SVD of the rows themselves."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(family=family)
    config = make_config(
        folder, recipe=recipe, sparsity=0.2, group_size=2 if recipe == "group-pca" else 0, tier="per-layer"
    )
    report = compress(config)
    seen: dict[str, torch.Tensor] = {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    for name, module in model.named_modules():
        if name.endswith(("layernorm", "layer_norm", "model.norm")):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.update({name: inputs[0].reshape(-1, 32).double()})
            )
    calibration = calibration_tokens(config)
    with torch.inference_mode():
        model(calibration)
    order = {
        "mistral": ["model.layers.{}.input_layernorm", "model.layers.{}.post_attention_layernorm"],
        "opt": ["model.decoder.layers.{}.self_attn_layer_norm", "model.decoder.layers.{}.final_layer_norm"],
    }[family]
    last = {"mistral": "model.norm", "opt": "model.decoder.final_layer_norm"}[family]
    rows = [seen[name.format(layer)] for layer in range(2) for name in order] + [seen[last]]
    if family == "opt":
        rows = [row - row.mean(1, keepdim=True) for row in rows]
    rows = [row / row.norm(dim=1, keepdim=True) for row in rows]
    hidden = report.plan["hidden"]
    errors = []
    for position, group in enumerate(hidden["group_of"]):
        members = torch.cat([row for row, member in zip(rows, hidden["group_of"], strict=True) if member == group])
        basis = torch.linalg.svd(members, full_matrices=False).Vh[: hidden["sizes"][position]].T
        errors.append(float((rows[position] - rows[position] @ basis @ basis.T).norm() / rows[position].norm()))
    reported = [block.predicted_error for layer in report.layers for block in layer.blocks]
    assert reported == pytest.approx(errors[:-1], rel=1e-3)
    mean_square = sum(error**2 for error in errors) / len(errors)
    assert report.hidden_error == pytest.approx(mean_square**0.5, rel=1e-3)


def test_predicted_and_measured_errors_agree_where_a_dense_stream_is_there(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    report = compress(make_config(make_checkpoint(), recipe="group-pca", correction="two-stream", hidden_size=26))
    inputs = [block for layer in report.layers for block in layer.blocks if block.kind.endswith("input")]
    assert [block.kind for block in inputs] == ["attention input", "ffn input"] * 2
    for block in inputs:
        assert block.predicted_error is not None
        assert block.measured_error == pytest.approx(block.predicted_error, rel=1e-3)  # one batch holds all the text


@pytest.mark.parametrize("group_size", [0, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_stored_model_is_the_one_that_was_streamed(
    family: str,
    group_size: int,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every part reduced and corrected, the last norm reads the same in the stream and in the checkpoint.

    The stream runs full-width layers of the stock class inside subspaces; the checkpoint holds folded, smaller ones.
    """
    folder = make_checkpoint(**FAMILIES[family])
    inner = {} if family == "qwen3-tied" else {"query_key_size": 4}
    config = make_config(
        folder,
        recipe="group-pca",
        group_size=group_size,
        hidden_size=24,
        ffn="id",
        value_size=6,
        correction="two-stream",
        sparsity={"opt": 0.35, "opt-tied": 0.15}.get(family, 0.45),
        **inner,
    )
    streamed: list[torch.Tensor] = []
    original = LayerCompressor.close

    def watched(self: LayerCompressor) -> None:
        assert self._subspaces is not None
        (states,) = [x for _, x, _ in self.streams.read()]
        streamed.append(states.double() @ self._subspaces.basis(4))
        original(self)

    monkeypatch.setattr(LayerCompressor, "close", watched)
    report = compress(config)
    assert report.plan["layers"][0]["intermediate_size"] < 64
    calibration = calibration_tokens(config)
    read_by_norm: list[torch.Tensor] = []
    model = load_model(Path(config.output), device=CPU, dtype=torch.float32)
    model.model.norm.register_forward_pre_hook(lambda _, inputs: read_by_norm.append(inputs[0].double()))
    with torch.inference_mode():
        model(calibration)
    assert read_by_norm[0].shape[-1] == 24
    torch.testing.assert_close(read_by_norm[0], streamed[0], rtol=0, atol=1e-4 * float(streamed[0].abs().max()))


def test_a_budget_is_spread_over_the_groups(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(layers=3), recipe="group-pca", group_size=2, sparsity=0.2)
    report = compress(config)
    sizes = report.plan["hidden"]["sizes"]
    assert len(set(sizes)) > 1
    stack = per_layer_shape(json.loads((Path(config.output) / "config.json").read_text()))
    assert stack.stored_parameters() == report.stored_parameters["compressed"]
    assert report.sparsity["reached"] == pytest.approx(0.2, abs=0.05)


def test_widths_follow_the_spectra() -> None:
    """Two groups of the same cost: the one whose energy lies in few directions gets fewer of them."""
    shape = ModelShape(2, 64, 128, 4, 4, 16, vocab_size=10)
    group_of = groups_of_positions(2, 2)
    layers = (LayerPlan(128, 4, 4),) * 2
    plan = Plan(layers, "kv-group", hidden=HiddenPlan(group_of, (48,) * 5), tier="per-layer")
    target = plan.stack(shape).stored_parameters()
    steep, flat = torch.logspace(0, -6, 64, dtype=torch.float64), torch.logspace(0, -1, 64, dtype=torch.float64)
    energies = torch.stack([steep, steep, flat, flat, flat])
    spread = spread_hidden_sizes(plan, shape, energies, target_parameters=target, round_to=4)
    assert spread.hidden is not None
    first, second = spread.hidden.sizes[0], spread.hidden.sizes[-1]
    assert first < 48 < second
    assert abs(spread.stack(shape).stored_parameters() - target) < 0.06 * target


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
        ({}, {"hidden": "pca", "hidden_size": 8, "sparsity": 0.1}, "give larger ones"),
        ({"tied": True}, {"recipe": "tcsp", "sparsity": 0.95}, "hidden size alone"),
        ({}, {"recipe": "tcsp", "sparsity": 0.1, "round_to": 64}, "--round-to"),
        ({}, {"recipe": "tcsp", "sparsity": 0.1, "group_size": 1}, "--tier per-layer"),
        ({}, {"recipe": "group-pca", "sparsity": 0.1, "group_size": 1, "tier": "stock"}, "--group-size 0"),
        ({"family": "opt"}, {"recipe": "tcsp", "sparsity": 0.1}, "--tier per-layer"),
        ({"family": "opt"}, {"recipe": "stat", "sparsity": 0.1}, "--heads none"),
        ({"family": "mistral", "sliding_window": 8}, {"recipe": "group-pca", "sparsity": 0.1}, "window of 8"),
        ({}, {"value_size": 4, "sparsity": 0.1}, "--tier per-layer"),
        ({}, {"query_key_size": 4, "sparsity": 0.1}, "--tier per-layer"),
        ({}, {"value_size": 8, "sparsity": 0.1, "tier": "per-layer"}, "not below"),
        ({}, {"query_key_size": 5, "sparsity": 0.1, "tier": "per-layer"}, "odd"),
        ({"family": "qwen3", "head_dim": 8}, {"query_key_size": 4, "tier": "per-layer", "sparsity": 0.1}, "Qwen3"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    options: dict[str, Any],
    changes: dict[str, Any],
    words: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    with pytest.raises(OneshotError, match=words):
        compress(make_config(make_checkpoint(**options), **changes))
