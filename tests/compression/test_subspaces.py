"""The smaller hidden size: exact at full width, with the errors that it reports, in every family and both forms."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens, cpu_machine
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from oneshot import OneshotError
from oneshot.architecture import ModelShape
from oneshot.architecture.stated_shapes import per_layer_shape
from oneshot.checkpoint import Model, open_model
from oneshot.compression import CompressedLayer, LayerCompressor, StreamSubspaces, find_subspaces
from oneshot.compression.fold import fold_hidden, to_rms_norms
from oneshot.config import FormName
from oneshot.evaluation import load_model
from oneshot.export import FORMS
from oneshot.families import FAMILIES as KNOWN_FAMILIES
from oneshot.families import LLAMA
from oneshot.linalg.pca import energies_along, principal_directions
from oneshot.method import TokenWeighting
from oneshot.pipeline import compress
from oneshot.planning import Budget, Grid, HiddenPlan, LayerPlan, Plan, groups_of_positions, spread_hidden_sizes
from oneshot.text import Text

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


class FixedSubspaces(StreamSubspaces):
    """Subspaces whose bases are given."""

    def __init__(self, group_of: tuple[int, ...], bases: list[torch.Tensor]) -> None:
        self._bases_of_positions = [bases[group] for group in group_of]

    def basis(self, position: int) -> torch.Tensor:
        return self._bases_of_positions[position]


def write_folded(
    model: Model, folder: Path, group_of: tuple[int, ...], bases: list[torch.Tensor], form_name: FormName
) -> None:
    """Write the whole model in the subspaces of its groups, as `compress` would."""
    shape, stack, form = model.shape, model.family.stack, FORMS[form_name]
    sizes = tuple(bases[group].shape[1] for group in group_of)
    layers = (LayerPlan(shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads),)
    plan = Plan(layers * shape.num_hidden_layers, "query-head", hidden=HiddenPlan(group_of, sizes))
    tensors: dict[str, torch.Tensor] = {}
    for part in form.outside(model, plan, FixedSubspaces(group_of, bases)):
        tensors |= part()
    for layer in range(shape.num_hidden_layers):
        stored = model.read_layer(layer)
        if shape.layer_norms:
            stored = to_rms_norms(stored, stack)
        first, after = stack.position(layer), stack.position(layer + 1)
        folded = fold_hidden(stored, stack, [bases[group] for group in group_of[first : after + 1]])
        tensors |= form.layer(model, layer, folded)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(form.config(model, plan)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, "per-layer") for family in FAMILIES),
        # a rotated OPT has RMSNorms, which its stock class does not have
        *((family, "stock") for family in FAMILIES if not family.startswith("opt")),
    ],
)
def test_a_rotation_at_full_width_changes_nothing(
    family: str, form: FormName, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = make_checkpoint(**FAMILIES[family])
    model = open_model(str(folder), tmp_path)
    group_of = groups_of_positions(4, 0 if form == "stock" else 1)
    bases = [random_basis(32, 32, seed) for seed in range(group_of[-1] + 1)]
    write_folded(model, tmp_path / "turned", group_of, bases, form)
    expected = logits(folder)
    torch.testing.assert_close(logits(tmp_path / "turned"), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("group_size", [0, 1, 2])
def test_unused_directions_cost_nothing(group_size: int, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A model whose states lie in 24 of 32 dimensions stays the same model, also its norms' widths and eps."""
    folder = make_checkpoint(family="mistral", tied=True)
    group_of = groups_of_positions(4, group_size)
    model = open_model(str(folder), tmp_path)
    stack = model.family.stack
    inside = tmp_path / "inside"
    write_folded(model, inside, groups_of_positions(4, 0), [random_basis(32, 32)], "stock")
    path = inside / "model.safetensors"
    tensors = load_file(path)
    span = random_basis(32, 24, seed=5)
    projection = (span @ span.T).float()
    for name in tensors:
        if name == stack.embedding:
            tensors[name] = tensors[name] @ projection
        elif name.endswith(tuple(f"{sublayer.writer}.weight" for sublayer in stack.sublayers)):
            tensors[name] = projection @ tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    turns = [span @ random_basis(24, 24, seed) for seed in range(group_of[-1] + 1)]
    form: FormName = "per-layer" if group_size else "stock"
    write_folded(open_model(str(inside), tmp_path), tmp_path / "narrow", group_of, turns, form)
    expected = logits(inside)
    torch.testing.assert_close(logits(tmp_path / "narrow"), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_subspace_equals_the_span_of_the_singular_vectors(seed: int, size: int) -> None:
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


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("token_weighting", get_args(TokenWeighting))
@pytest.mark.parametrize("shared_weight", [0.0, 0.5])
def test_energies_equal_the_singular_values_of_the_norms_inputs(
    family: str,
    token_weighting: TokenWeighting,
    shared_weight: float,
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    """Against hooks on the stock model; a group's rows are stacked with a share of all others' rows."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(**FAMILIES[family])
    model, text = open_model(str(folder), tmp_path), Text(TOKEN_IDS, "text")
    group_of = (0, 0, 0, 1, 1)
    counted: list[float] = []
    subspaces = find_subspaces(
        model,
        text,
        group_of,
        cpu_machine(tmp_path, batch_size=1),
        token_weighting=token_weighting,
        shared_weight=shared_weight,
        advance=counted.append,
    )
    assert sum(counted) == pytest.approx(2 * text.num_tokens)  # once a layer
    rows = inputs_of_norms(AutoModelForCausalLM.from_pretrained(folder).eval(), TOKEN_IDS)
    if family == "opt":
        rows = [row - row.mean(1, keepdim=True) for row in rows]
    if token_weighting == "unit":
        rows = [row / row.square().mean(1, keepdim=True).sqrt() for row in rows]
    for position, group in enumerate(group_of):
        shares = [1.0 if member == group else shared_weight**0.5 for member in group_of]
        stacked = torch.cat([share * row for share, row in zip(shares, rows, strict=True)])
        directions = torch.linalg.svd(stacked, full_matrices=False).Vh.T
        basis = subspaces.basis(position, 5)
        torch.testing.assert_close(basis @ basis.T, directions[:, :5] @ directions[:, :5].T, rtol=0, atol=1e-3)
        energies = (rows[position] @ directions).square().sum(0)
        torch.testing.assert_close(subspaces.energies[position], energies, rtol=1e-3, atol=1e-4 * float(energies.max()))
        lost = rows[position] - rows[position] @ basis @ basis.T
        error = float(lost.norm() / rows[position].norm())
        assert subspaces.relative_error(position, 5) == pytest.approx(error, rel=1e-3)


def inputs_of_norms(model: Any, token_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows that the norms of a stock model with two layers read, float64, position by position."""
    stack = KNOWN_FAMILIES[model.config.model_type].stack
    assert stack.final_norm is not None
    inputs: dict[str, torch.Tensor] = {}
    names = [f"{stack.layer_prefix(layer)}{sublayer.norm.name}" for layer in range(2) for sublayer in stack.sublayers]
    names.append(stack.final_norm.name)
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: inputs.update({name: args[0].reshape(-1, 32).double()})
        )
    with torch.inference_mode():
        model(token_ids)
    return [inputs[name] for name in names]


@pytest.mark.parametrize("recipe", ["tcsp", "group-pca"])
@pytest.mark.parametrize("family", ["mistral", "opt"])
def test_reported_errors_equal_the_errors_of_the_norms_inputs(
    recipe: str, family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Against hooks on the stock model and an SVD of the rows themselves."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(family=family)
    config = make_config(
        folder, recipe=recipe, sparsity=0.2, group_size=2 if recipe == "group-pca" else 0, form="per-layer"
    )
    report = compress(config)
    rows = inputs_of_norms(AutoModelForCausalLM.from_pretrained(folder).eval(), calibration_tokens(config))
    if family == "opt":
        rows = [row - row.mean(1, keepdim=True) for row in rows]
    rows = [row / row.norm(dim=1, keepdim=True) for row in rows]
    hidden = report.plan["hidden"]
    errors = []
    for position, group in enumerate(hidden["group_of"]):
        members = torch.cat([row for row, member in zip(rows, hidden["group_of"], strict=True) if member == group])
        basis = torch.linalg.svd(members, full_matrices=False).Vh[: hidden["sizes"][position]].T
        errors.append(float((rows[position] - rows[position] @ basis @ basis.T).norm() / rows[position].norm()))
    reported = [sublayer.predicted_error for layer in report.layers for sublayer in layer.sublayers]
    assert reported == pytest.approx(errors[:-1], rel=1e-3)
    mean_square = sum(error**2 for error in errors) / len(errors)
    assert report.hidden_error == pytest.approx(mean_square**0.5, rel=1e-3)


def test_predicted_errors_equal_measured_errors_with_a_dense_stream(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    report = compress(make_config(make_checkpoint(), recipe="group-pca", correction="two-stream", hidden_size=26))
    sublayers = [sublayer for layer in report.layers for sublayer in layer.sublayers]
    inputs = [sublayer for sublayer in sublayers if sublayer.kind.endswith("input")]
    assert [sublayer.kind for sublayer in inputs] == ["attention input", "ffn input"] * 2
    for sublayer in inputs:
        assert sublayer.predicted_error is not None
        assert sublayer.measured_error == pytest.approx(sublayer.predicted_error, rel=1e-3)  # one batch is all the text


@pytest.mark.parametrize("group_size", [0, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_stored_model_equals_the_streamed_one(
    family: str,
    group_size: int,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last norm reads the same in the stream and in the checkpoint, with every part reduced and corrected.

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
    original = LayerCompressor.compress_layer

    def watched(self: LayerCompressor, layer: int, tensors: dict[str, torch.Tensor]) -> CompressedLayer:
        compressed = original(self, layer, tensors)
        if layer == 1:
            assert self._subspaces is not None
            assert self._states is not None
            ((x, _),) = self._states.read()  # one batch is all the text
            streamed.append(x.double() @ self._subspaces.basis(4))
        return compressed

    monkeypatch.setattr(LayerCompressor, "compress_layer", watched)
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


@pytest.mark.parametrize("allocation", ["auto", "uniform", "error"])
def test_a_budget_is_spread_over_the_groups(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, allocation: str
) -> None:
    """Groups of a stream that passes them all are equal unless one asks for widths of their own."""
    folder = make_checkpoint(layers=3)
    config = make_config(folder, recipe="group-pca", group_size=2, sparsity=0.2, allocation=allocation)
    report = compress(config)
    sizes = report.plan["hidden"]["sizes"]
    assert (len(set(sizes)) > 1) == (allocation == "error")
    stack = per_layer_shape(json.loads((Path(config.output) / "config.json").read_text()))
    assert stack.stored_parameters() == report.stored_parameters["compressed"]
    assert report.sparsity["reached"] == pytest.approx(0.2, abs=0.05)


def test_widths_follow_the_spectra() -> None:
    """Of two groups of the same cost, the one whose energy lies in few directions gets fewer of them."""
    shape = ModelShape(2, 64, 128, 4, 4, 16, vocab_size=10)
    group_of = groups_of_positions(4, 2)
    grid = Grid(LLAMA, shape, layers_differ=True, subspaces_differ=True, maps_tied_head=True)
    plan = Plan((LayerPlan(128, 4, 4),) * 2, "kv-group", hidden=HiddenPlan(group_of, (48,) * 5))
    target = grid.stack(plan).stored_parameters()
    steep, flat = torch.logspace(0, -6, 64, dtype=torch.float64), torch.logspace(0, -1, 64, dtype=torch.float64)
    energies = torch.stack([steep, steep, flat, flat, flat])
    spread = spread_hidden_sizes(grid, plan, energies, budget=Budget(target), round_to=4)
    assert spread.hidden is not None
    first, second = spread.hidden.sizes[0], spread.hidden.sizes[-1]
    assert first < 48 < second
    assert abs(grid.stack(spread).stored_parameters() - target) < 0.06 * target


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
        ({"attention_bias": True}, {"recipe": "tcsp", "sparsity": 0.05}, r"No stock config .* Use --form per-layer\.$"),
        ({}, {"hidden_size": 28, "sparsity": 0.1}, "--set hidden=pca"),
        ({}, {"hidden": "pca", "sparsity": 0.1}, "Give --set hidden_size="),
        ({}, {"recipe": "tcsp", "hidden_size": 28, "sparsity": 0.1}, "Give either --set hidden_size="),
        ({}, {"recipe": "group-pca", "sparsity": 0.1, "allocation": "stat"}, "a hidden size has uniform or error"),
        ({}, {"hidden": "pca", "hidden_size": 33, "sparsity": 0.1}, "is above"),
        ({}, {"hidden": "pca", "hidden_size": 8, "sparsity": 0.1}, "give larger ones"),
        ({"tied": True}, {"recipe": "tcsp", "sparsity": 0.95}, "hidden size alone"),
        ({}, {"recipe": "tcsp", "sparsity": 0.1, "round_to": 64}, "--round-to"),
        ({}, {"recipe": "tcsp", "sparsity": 0.1, "group_size": 1}, "--form per-layer"),
        ({}, {"recipe": "group-pca", "sparsity": 0.1, "group_size": 1, "form": "stock"}, "--set group_size=0"),
        ({"family": "opt"}, {"recipe": "tcsp", "sparsity": 0.1}, "--form per-layer"),
        ({"family": "opt"}, {"recipe": "stat", "form": "stock", "sparsity": 0.1}, "--set heads=none"),
        ({"family": "mistral", "sliding_window": 8}, {"recipe": "group-pca", "sparsity": 0.1}, "keeps its hidden size"),
        ({}, {"value_size": 4, "sparsity": 0.1}, "--form per-layer"),
        ({}, {"query_key_size": 4, "sparsity": 0.1}, "--form per-layer"),
        ({}, {"value_size": 8, "sparsity": 0.1, "form": "per-layer"}, "not below"),
        ({}, {"query_key_size": 5, "sparsity": 0.1, "form": "per-layer"}, "odd"),
        (
            {"family": "qwen3", "head_dim": 8},
            {"query_key_size": 4, "form": "per-layer", "sparsity": 0.1},
            "qwen3, which norms both",
        ),
    ],
)
def test_impossible_sizes_are_refused_before_any_work(
    options: dict[str, Any],
    changes: dict[str, Any],
    words: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    with pytest.raises(OneshotError, match=words):
        compress(make_config(make_checkpoint(**options), **changes))
