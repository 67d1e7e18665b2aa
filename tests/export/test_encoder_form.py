"""The per-layer form of encoders: exact at full width, below it the stream's, and a complete transformers model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from damage import edit_config
from factories import MakeConfig, build_model, topics
from safetensors.torch import load_file
from torch import nn

from oneshot.checkpoint import Checkpoint
from oneshot.compression.fold import head_columns
from oneshot.errors import PlanError
from oneshot.export import stated_shape
from oneshot.families import FAMILIES
from oneshot.pipeline import compress

TOKEN_IDS = torch.randint(2, 400, (4, 24), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(24) < torch.tensor([[24], [5], [13], [1]])).long()
CLASSES = [(family, name) for family in ("bert", "distilbert") for name in FAMILIES[family].classes]
FULL_WIDTH = 2e-5  # of the largest output


def auto(folder: Path, name: str) -> Any:
    """Load a result by the auto class of a stock class's task, with the modelling file beside it."""

    task = next(task for task in ("ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering",
                                  "ForTokenClassification", "Model") if name.endswith(task))  # fmt: skip
    loader = getattr(transformers, "AutoModel" if task == "Model" else f"AutoModel{task}")
    model, info = loader.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(model).__module__.startswith("transformers_modules")
    return model.eval()


def outputs(model: Any, **arguments: Any) -> list[torch.Tensor]:
    """Return what a model says of real tokens; padding may differ."""
    with torch.inference_mode():
        found = model(TOKEN_IDS, attention_mask=MASK, **arguments)
    values = [value for value in found.values() if isinstance(value, torch.Tensor)]
    return [value[MASK.bool()] if value.shape[:2] == MASK.shape else value for value in values]


def assert_close(ours: Any, wanted: Any, tolerance: float, **arguments: Any) -> None:
    found, expected = outputs(ours, **arguments), outputs(wanted, **arguments)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * float(other.abs().max()))


@pytest.fixture
def make(tmp_path: Path, tokenizer: Any, make_config: MakeConfig) -> Any:
    """`make(family, class, …)` -> the dense model and a function that compresses it and loads the result."""
    (tmp_path / "text.txt").write_text(topics(0, 10))

    def make_model(family: str, name: str, change: Any = None, **sizes: Any) -> tuple[Any, Any]:
        dense = build_model(family, layers=3, tied=sizes.pop("tied", True), model_class=name, **sizes)
        if change is not None:
            with torch.no_grad():
                change(dense)
        dense.save_pretrained(tmp_path / "dense")
        tokenizer.save_pretrained(tmp_path / "dense")

        def run(**options: Any) -> Any:
            text = str(tmp_path / "text.txt")
            config = make_config(
                tmp_path / "dense", **{"form": "per-layer", "calibration": text, "overwrite": True} | options
            )
            run.report = compress(config)  # type: ignore[attr-defined]
            return auto(Path(config.output), name)

        return dense, run

    return make_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "name"), CLASSES)
def test_without_cuts_every_class_keeps_its_outputs(family: str, name: str, tied: bool, make: Any) -> None:
    dense, run = make(family, name, tied=tied)
    arguments = {"output_hidden_states": True, "output_attentions": True}
    ours = run(sparsity=0.0)
    assert_close(ours, dense, 1e-6)
    with torch.inference_mode():
        found, wanted = (model(TOKEN_IDS, **arguments) for model in (ours, dense))
    for kind in ("hidden_states", "attentions"):
        assert len(found[kind]) == len(wanted[kind])
    torch.testing.assert_close(found.hidden_states[-1], wanted.hidden_states[-1], rtol=0, atol=1e-5)
    assert ours.num_parameters() == dense.num_parameters()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_a_config_asks_a_model_to_return_is_returned(attention: str, make: Any, tmp_path: Path) -> None:
    """Attention weights come from eager attention alone, as of the stock class."""
    _, run = make("bert", "BertModel")
    edit_config(tmp_path / "dense", output_hidden_states=True, output_attentions=True)
    models = run(sparsity=0.0), transformers.AutoModel.from_pretrained(tmp_path / "dense")
    for model in models:
        model.set_attn_implementation(attention)
    with torch.inference_mode():
        found, wanted = (model(TOKEN_IDS) for model in models)
    assert (len(found.hidden_states), len(found.attentions)) == (4, 3 * (attention == "eager"))
    for kind in ("hidden_states", "attentions"):
        assert [one.shape for one in found[kind]] == [one.shape for one in wanted[kind]]


@pytest.mark.parametrize("group_size", [0, 1, 2])
@pytest.mark.parametrize(("family", "name"), CLASSES)
def test_rotation_at_full_width_keeps_the_outputs(family: str, name: str, group_size: int, make: Any) -> None:
    """D − 1 directions hold everything that a LayerNorm reads: SP3 is exact there (equations 5 to 8, 17 and 18)."""
    dense, run = make(family, name)
    ours = run(recipe="group-pca", group_size=group_size, hidden_size=31)
    assert_close(ours, dense, FULL_WIDTH)
    shape = stated_shape(ours.config.to_dict())
    assert shape is not None
    assert shape.stored_parameters() == ours.num_parameters() == run.report.stored_parameters["compressed"]
    [layer] = {(layer.hidden_size, layer.middle_size, layer.output_size) for layer in shape.layers}
    assert layer == (31, 31, 31)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_groups_behind_norms_get_widths_of_their_own(family: str, make: Any) -> None:
    """SP3 section 3.2: there a group's subspace is no bottleneck for the others, and the default spreads the size."""
    _, run = make(family, FAMILIES[family].classes[0])
    run(recipe="group-pca", group_size=1, sparsity=0.2, allocation="uniform")
    [width] = set(run.report.plan["hidden"]["sizes"])
    ours = run(recipe="group-pca", group_size=1, sparsity=0.2)
    sizes = run.report.plan["hidden"]["sizes"]
    assert min(sizes) < width < max(sizes)
    assert ours.num_parameters() == run.report.stored_parameters["compressed"]


class ProjectedNorm(nn.Module):
    """A LayerNorm whose centred input is first projected, written from SP3's equations 5 to 8."""

    def __init__(self, norm: nn.LayerNorm, projection: torch.Tensor) -> None:
        super().__init__()
        self.norm, self.projection = norm, projection

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        inside = (z - z.mean(-1, keepdim=True)) @ self.projection
        scaled = inside / (inside.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
        return scaled * self.norm.weight + self.norm.bias


@pytest.mark.parametrize("options", [{}, {"ffn": "id", "heads": "id", "correction": "two-stream", "sparsity": 0.5}])
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_smaller_subspaces_are_projections_before_the_norms(family: str, options: dict[str, Any], make: Any) -> None:
    """The subspaces are read back from the stored embedding and shortcuts, which are products with known factors."""
    name = FAMILIES[family].classes[0]
    dense, run = make(family, name)
    ours = run(recipe="group-pca", group_size=1, hidden_size=20, **options)
    report = run.report
    inputs = [part for layer in report.layers for part in layer.sublayers if part.kind.endswith("input")]
    assert {part.kept_size for part in inputs} == {20}
    if options:
        assert report.layers[0].sublayers[-1].measured_error is not None
        return
    stack = FAMILIES[family].stack
    norms = [dense.get_submodule(stack.embedding_norm.name)]  # type: ignore[union-attr]
    for layer in range(3):
        norms += [dense.get_submodule(stack.layer_prefix(layer) + sublayer.norm.name) for sublayer in stack.sublayers]
    bases = []
    centred = dense.get_input_embeddings().weight.detach().double()
    centred = centred - centred.mean(1, keepdim=True)
    stored = [ours.embeddings.word_embeddings.weight.detach().double()]
    bases.append(torch.linalg.lstsq(centred, stored[0]).solution)  # E R U = stored
    for layer in ours.encoder.layer:
        for shortcut in (layer.attention_shortcut, layer.ffn_shortcut):
            right = norms[len(bases) - 1].weight.detach().double().unsqueeze(1) * bases[-1]  # diag(γ) U
            found = torch.linalg.lstsq(right.T, shortcut.weight.detach().double().T).solution  # U'ᵀ R X = W
            bases.append(found - found.mean(0))
    # with fewer directions the shortcuts do not determine the next subspace, so the output map gives the last one
    gamma = norms[-1].weight.detach().double().unsqueeze(1)
    last = ours.output_map.weight.detach().double() / gamma
    identity = torch.eye(20, dtype=torch.float64)
    torch.testing.assert_close(bases[0].T @ bases[0], identity, rtol=0, atol=1e-4)
    torch.testing.assert_close(last.T @ last, identity, rtol=0, atol=1e-4)
    torch.testing.assert_close(last.mean(0), torch.zeros(20, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_the_folded_model_equals_the_stock_model_with_projected_norms(
    family: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream passes stock layers with projected norms; the checkpoint must compute the same."""
    from oneshot.compression import subspaces

    kept: dict[int, torch.Tensor] = {}
    original = subspaces.StreamSubspaces.basis

    def spy(self: Any, position: int) -> torch.Tensor:
        kept[position] = original(self, position)
        return kept[position]

    monkeypatch.setattr(subspaces.StreamSubspaces, "basis", spy)
    dense, run = make(family, FAMILIES[family].classes[0])
    ours = run(recipe="group-pca", group_size=1, hidden_size=20)
    stack = FAMILIES[family].stack
    assert stack.embedding_norm is not None
    names = [stack.embedding_norm.name]
    for layer in range(3):
        names += [stack.layer_prefix(layer) + sublayer.norm.name for sublayer in stack.sublayers]
    for position, name in enumerate(names):
        basis = kept[position].float()
        dense.set_submodule(name, ProjectedNorm(dense.get_submodule(name), basis @ basis.T))
    assert_close(ours, dense, FULL_WIDTH)


@pytest.mark.parametrize("correction", ["none", "same-layer"])
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_silent_heads_are_removed_without_loss(family: str, correction: str, make: Any) -> None:
    stack, silent = FAMILIES[family].stack, torch.tensor([1, 2])

    def silence(model: Any) -> None:
        for layer in range(3):
            writer = model.get_submodule(stack.layer_prefix(layer) + stack.attention.out)
            writer.weight[:, head_columns(silent, 8)] = 0

    dense, run = make(family, FAMILIES[family].classes[0], silence)
    removed = 3 * 2 * 8 * (3 * 33 + 32)
    ours = run(
        heads="id", ffn="none", allocation="uniform", correction=correction, num_sequences=64,
        parameters=dense.num_parameters() - removed, **({} if correction == "none" else {"damping": 1e-7}),
    )  # fmt: skip
    assert ours.encoder.layer[0].attention.self.query.weight.shape == (16, 32)
    assert dense.num_parameters() - ours.num_parameters() == removed
    assert_close(ours, dense, 1e-4)


@pytest.mark.parametrize("sizes", [{"value_size": 6}, {"query_key_size": 5}, {"value_size": 7, "query_key_size": 7}])
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_smaller_values_and_queries_of_low_rank_lose_nothing(family: str, sizes: dict[str, int], make: Any) -> None:
    """Values that write through few coordinates, and queries that read few, have smaller heads with equal outputs."""
    stack = FAMILIES[family].stack

    def reduce(model: Any) -> None:
        for layer in range(3):
            prefix = stack.layer_prefix(layer)
            writer = model.get_submodule(prefix + stack.attention.out)
            query = model.get_submodule(prefix + stack.attention.q)
            for head in range(4):
                writer.weight[:, 8 * head + sizes.get("value_size", 8) : 8 * head + 8] = 0
                query.weight[8 * head + sizes.get("query_key_size", 8) : 8 * head + 8] = 0
                query.bias[8 * head + sizes.get("query_key_size", 8) : 8 * head + 8] = 0

    dense, run = make(family, FAMILIES[family].classes[0], reduce)
    ours = run(ffn="none", correction="none", **sizes)
    [shape] = set(stated_shape(ours.config.to_dict()).layers)  # type: ignore[union-attr]
    assert (shape.value_size, shape.query_key_size) == (sizes.get("value_size", 8), sizes.get("query_key_size", 8))
    assert_close(ours, dense, 1e-4)


def test_layers_share_the_target_by_a_profile(make: Any) -> None:
    _dense, run = make("bert", "BertModel", width=64)
    ours = run(heads="id", sparsity=0.15, round_to=4)
    widths = [layer["intermediate_size"] for layer in ours.config.layers]
    assert len(set(widths)) > 1
    assert run.report.sparsity["reached"] == pytest.approx(0.15, abs=0.01)
    assert all(bool(value.isfinite().all()) for value in outputs(ours))


def test_depth_leaves_out_layers(make: Any) -> None:
    _dense, run = make("distilbert", "DistilBertModel")
    ours = run(ffn="none", depth="sensitivity", sparsity=0.2)
    assert len(ours.encoder.layer) == 2
    assert ours.num_parameters() == run.report.stored_parameters["compressed"]


def test_a_result_is_saved_again_and_trains(make: Any, tmp_path: Path) -> None:
    _, run = make("bert", "BertForSequenceClassification")
    ours = run(recipe="group-pca", group_size=1, hidden_size=20)
    loss = ours(TOKEN_IDS, labels=torch.tensor([0, 1, 1, 0])).loss
    loss.backward()
    assert all(parameter.grad is not None for name, parameter in ours.named_parameters() if "classifier" in name)
    ours.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == Checkpoint(tmp_path / "out").shapes.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_entries_of_other_libraries_stay_in_the_config(family: str, make: Any, tmp_path: Path) -> None:
    """sentence-transformers reads there how scores of a cross-encoder end."""
    of_others = {
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        "task_specific_params": None,
    }
    stale = {"torch_dtype": "float16", "layers": 3, "head": "own", "_commit_hash": "0", "max_length": 20}
    dense, run = make(family, next(name for name in FAMILIES[family].classes if "SequenceClass" in name))
    edit_config(tmp_path / "dense", **of_others | stale)
    ours = run(sparsity=0.0)
    assert_close(ours, dense, 1e-6)
    ours.save_pretrained(tmp_path / "again")
    for folder in (Path(run.report.config["output"]), tmp_path / "again"):
        written = json.loads((folder / "config.json").read_text())
        assert {name: written[name] for name in of_others} == of_others
        assert not {"torch_dtype", "_commit_hash", "max_length"} & written.keys()
        assert (len(written["layers"]), written["head"]) == (3, "none")


def test_a_smaller_hidden_size_needs_the_per_layer_form(make: Any) -> None:
    _, run = make("bert", "BertModel")
    with pytest.raises(PlanError, match="--form per-layer"):
        run(form="stock", recipe="tcsp", hidden_size=20)


@pytest.mark.parametrize("form", ["stock", "per-layer"])
@pytest.mark.parametrize("name", ["BertModel", "XLMRobertaModel"])
def test_a_plain_encoder_may_lack_its_pooler(
    name: str, form: str, tmp_path: Path, tokenizer: Any, make_config: MakeConfig
) -> None:
    """As files of sentence encoders do: so does the result, whose states are the stream's."""
    if (name, form) == ("XLMRobertaModel", "per-layer"):
        pytest.skip("the family has the stock form alone")
    dense = build_model("bert" if name == "BertModel" else "xlm-roberta", model_class=name)
    dense.pooler = None
    dense.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(topics(0, 10))
    options = {"calibration": str(tmp_path / "text.txt"), "form": form, "round_to": 4}
    kept = make_config(tmp_path / "dense", sparsity=0.0, output=str(tmp_path / "kept"), **options)
    smaller = make_config(tmp_path / "dense", sparsity=0.1, output=str(tmp_path / "smaller"), **options)
    for config in (kept, smaller):
        report = compress(config)
        stored = load_file(Path(config.output) / "model.safetensors")
        assert not any("pooler" in tensor for tensor in stored)
        assert report.stored_parameters["compressed"] == sum(tensor.numel() for tensor in stored.values())
    model = transformers.AutoModel.from_pretrained(kept.output, trust_remote_code=True).eval()
    with torch.inference_mode():
        states = [each(TOKEN_IDS, attention_mask=MASK).last_hidden_state[MASK.bool()] for each in (model, dense)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=FULL_WIDTH * float(states[1].abs().max()))


@pytest.mark.parametrize(("family", "name"), [("bert", "BertForMaskedLM"), ("distilbert", "DistilBertForMaskedLM")])
@pytest.mark.parametrize("size", [403, 390])
def test_the_vocabulary_has_another_size_where_the_embedding_is_in_a_subspace(
    family: str, name: str, size: int, make: Any, tmp_path: Path
) -> None:
    _, run = make(family, name)
    model = run(recipe="group-pca", group_size=1, sparsity=0.2)
    assert model.config.head == "mapped"
    tokens, common = torch.arange(3, 380).unsqueeze(0)[:, :40], min(size, 400)
    with torch.inference_mode():
        before = model(tokens).logits
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()
        after = model(tokens).logits
        assert after.shape[-1] == size
        torch.testing.assert_close(after[..., :common], before[..., :common], rtol=0, atol=1e-5)
        model.save_pretrained(tmp_path / "saved")
        torch.testing.assert_close(auto(tmp_path / "saved", name)(tokens).logits, after, rtol=0, atol=1e-5)
