"""The per-layer form of encoders: transformers' own BERT and DistilBERT, with smaller sizes and in subspaces."""

from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_forms import (
    MASK,
    STOCK,
    TASKS,
    TOKEN_IDS,
    Tensors,
    as_stored,
    fold_into_subspaces,
    inputs_of,
    layer_tensors,
    layers_of,
    open_form,
    outputs_of,
    outside_of,
    random_bases,
    relative_difference,
    save_form,
    shape_of,
    stack_of,
)
from factories import build_model

ALL = [(family, task) for family in STOCK for task in TASKS]
ATTENTIONS = ("eager", "sdpa")


def build(family: str, task: str, **options: Any) -> Any:
    given: dict[str, Any] = {"layers": 2, "width": 48, "tied": True} | options
    return build_model(family, model_class=f"{STOCK[family]}{task}", **given)


def save_unchanged(folder: Path, stock: Any) -> Path:
    """Write a stock model in the encoder form, all sizes as they are."""
    layers = [layer_tensors(stock, number) for number in range(len(layers_of(stock)))]
    tensors = as_stored(stock, layers, outside_of(stock))
    return save_form(folder, stock, tensors, [shape_of(stock)] * len(layers), subspaces=False)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("family", "task"), ALL)
def test_without_cuts_it_has_the_bits_of_the_stock_class(
    family: str, task: str, attention: str, tmp_path: Path
) -> None:
    stock = build(family, task)
    stock.set_attn_implementation(attention)
    form = open_form(save_unchanged(tmp_path / "form", stock), attn_implementation=attention)
    given = inputs_of(stock) | {"output_hidden_states": True, "output_attentions": attention == "eager"}
    with torch.inference_mode():
        expected, found = stock(**given), form(**given)
        as_tuple, expected_tuple = (model(**inputs_of(stock), return_dict=False) for model in (form, stock))
    names = expected.keys() - {"cross_attentions"}  # an empty list in BERT
    assert found.keys() == names
    for name in names:
        value = expected[name]
        values, others = (value, found[name]) if isinstance(value, tuple) else ((value,), (found[name],))
        assert len(values) == len(others)
        assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True)), name
    assert len(as_tuple) == len(expected_tuple)
    assert torch.equal(as_tuple[0], expected_tuple[0])
    unmasked = {"input_ids": TOKEN_IDS}
    assert relative_difference(form, stock, unmasked) == 0
    assert form.num_parameters() == stock.num_parameters()


@pytest.mark.parametrize("options", [{"tied": False}, {"layer_norm_eps": 0.5}, {"hidden_act": "relu"}])
def test_options_of_the_dense_config_are_kept(options: dict[str, Any], tmp_path: Path) -> None:
    stock = build("bert", "ForMaskedLM", **options)
    form = open_form(save_unchanged(tmp_path / "form", stock))
    assert relative_difference(form, stock, inputs_of(stock)) == 0


@pytest.mark.parametrize(("family", "task"), [pair for pair in ALL if pair[1] != "Model"])
def test_losses_and_gradients_are_those_of_the_stock_class(family: str, task: str, tmp_path: Path) -> None:
    stock = build(family, task)
    form = open_form(save_unchanged(tmp_path / "form", stock))
    labels: dict[str, torch.Tensor] = {
        "ForMaskedLM": {"labels": TOKEN_IDS.masked_fill(MASK == 0, -100)},
        "ForSequenceClassification": {"labels": torch.tensor([0, 1, 1, 0])},
        "ForQuestionAnswering": {
            "start_positions": torch.tensor([1, 0, 2, 30]),
            "end_positions": torch.tensor([2, 1, 5, 3]),
        },
        "ForTokenClassification": {"labels": (TOKEN_IDS % 2).masked_fill(MASK == 0, -100)},
    }[task]
    given = inputs_of(stock) | labels
    losses = [model(**given).loss for model in (stock, form)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    form.activation_checkpointing_enable()
    form.train()
    for module in form.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    losses[0].backward()
    form(**given).loss.backward()
    name = stack_of(stock).embedding
    found = form.bert.get_parameter(name).grad
    expected = getattr(stock, stock.base_model_prefix).get_parameter(name).grad
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def cut_and_silence(
    layer: Any, stack: Any, tensors: Tensors, heads: list[int], queries: list[int], values: list[int], width: int
) -> Tensors:
    """Return a layer with fewer rows and columns, and set what it lacks to zero in the stock layer.

    `queries`, `values`: the coordinates of a head of 8 that stay.
    """
    attention, ffn = stack.attention, stack.ffn
    scores = [head * 8 + place for head in heads for place in queries]
    outputs = [head * 8 + place for head in heads for place in values]
    neurons = list(range(width))
    cut = dict(tensors)
    for linear, rows in {attention.q: scores, attention.k: scores, attention.v: outputs, ffn.up: neurons}.items():
        module = layer.get_submodule(linear)
        gone = torch.ones(module.out_features, dtype=torch.bool)
        gone[rows] = False
        for part in ("weight", "bias"):
            cut[f"{linear}.{part}"] = tensors[f"{linear}.{part}"][rows].clone()
            if linear != attention.v:
                getattr(module, part)[gone] = 0
    for linear, columns in {attention.out: outputs, ffn.down: neurons}.items():
        module = layer.get_submodule(linear)
        cut[f"{linear}.weight"] = tensors[f"{linear}.weight"][:, columns].clone()
        gone = torch.ones(module.in_features, dtype=torch.bool)
        gone[columns] = False
        module.weight[:, gone] = 0
    return {name: tensor for name, tensor in cut.items() if tensor.numel()}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", list(STOCK))
def test_smaller_sizes_equal_a_stock_model_with_zeros(family: str, attention: str, tmp_path: Path) -> None:
    """Layer 0: 3 heads, other sizes of queries and values. Layer 1: nothing attends. Layer 2: no neurons."""
    stock = build(family, "Model", layers=3)
    stock.set_attn_implementation(attention)
    sizes: list[tuple[list[int], list[int], list[int], int]] = [
        ([0, 1, 3], [0, 2, 3, 5, 7], [1, 4, 6], 20),
        ([], [0], [0], 48),
        ([2], list(range(8)), list(range(8)), 0),
    ]
    layers, shapes = [], []
    for number, (heads, queries, values, width) in enumerate(sizes):
        tensors = {name: tensor.clone() for name, tensor in layer_tensors(stock, number).items()}
        layers.append(
            cut_and_silence(layers_of(stock)[number], stack_of(stock), tensors, heads, queries, values, width)
        )
        shapes.append(
            shape_of(
                stock,
                num_attention_heads=len(heads),
                num_key_value_heads=len(heads),
                query_key_size=len(queries),
                value_size=len(values),
                intermediate_size=width,
            )
        )
    tensors = as_stored(stock, layers, outside_of(stock))
    form = open_form(
        save_form(tmp_path / "form", stock, tensors, shapes, subspaces=False), attn_implementation=attention
    )
    assert relative_difference(form, stock, inputs_of(stock)) < 2e-6
    stored = sum(tensor.numel() for tensor in tensors.values())
    assert sum(parameter.numel() for parameter in form.parameters()) == stored
    own = [tensor.numel() for name, tensor in tensors.items() if name.startswith("encoder.layer.0.")]
    assert shapes[0].parameters() == sum(own)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", list(STOCK))
def test_it_is_saved_and_loaded_with_remote_code(family: str, task: str, tmp_path: Path) -> None:
    import transformers

    stock = build(family, task)
    tensors, shapes = fold_into_subspaces(stock, random_bases([24, 28, 20, 30, 26], 32))
    folder = save_form(tmp_path / "form", stock, tensors, shapes, subspaces=True)
    auto = getattr(transformers, "AutoModel" + task.removeprefix("Model"))
    model, info = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert type(model).__module__.startswith("transformers_modules")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    first = outputs_of(model.eval(), inputs_of(stock))
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "modeling_oneshot_encoder.py").exists()
    again = auto.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    assert all(torch.equal(value, first[name]) for name, value in outputs_of(again, inputs_of(stock)).items())
    with torch.inference_mode():
        states = again(**inputs_of(stock), output_hidden_states=True).hidden_states
    assert [state.shape[-1] for state in states] == [24, 20, 32], "the last states have the dense model's width"


def test_a_head_can_be_put_on_a_plain_encoder_and_taken_off(tmp_path: Path) -> None:
    """The prefix of the stored names does not matter, as in the stock classes."""
    import transformers

    stock = build("bert", "Model")
    plain = save_unchanged(tmp_path / "plain", stock)
    classifier, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        plain, trust_remote_code=True, output_loading_info=True
    )
    assert sorted(info["missing_keys"]) == ["classifier.bias", "classifier.weight"]
    classifier.save_pretrained(tmp_path / "classifier")
    without = transformers.AutoModel.from_pretrained(tmp_path / "classifier", trust_remote_code=True).eval()
    assert relative_difference(without, stock, inputs_of(stock)) == 0


@pytest.mark.parametrize("family", list(STOCK))
def test_embeddings_are_found_and_replaced(family: str, tmp_path: Path) -> None:
    form = open_form(save_unchanged(tmp_path / "form", build(family, "ForMaskedLM")))
    assert form.get_input_embeddings() is form.bert.embeddings.word_embeddings
    assert form.get_output_embeddings().weight is form.get_input_embeddings().weight
    form.resize_token_embeddings(410)
    with torch.inference_mode():
        assert form(TOKEN_IDS + 10).logits.shape == (4, 20, 410)
    assert form.get_output_embeddings().weight is form.get_input_embeddings().weight


def test_half_precision_keeps_the_norms_in_single_precision(tmp_path: Path) -> None:
    stock = build("bert", "Model")
    tensors, shapes = fold_into_subspaces(stock, random_bases([32] * 5, 32))
    folder = save_form(tmp_path / "form", stock, tensors, shapes, subspaces=True)
    half = open_form(folder, dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in half.parameters())
    norm = half.encoder.layer[0].output.LayerNorm
    states = 300 * torch.randn(3, 32)
    expected = states / (states.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    torch.testing.assert_close(norm(states.bfloat16()).float(), expected, rtol=2e-2, atol=1e-2)
    assert relative_difference(half, stock, inputs_of(stock)) < 0.1


def test_either_tokens_or_embeddings_must_be_given(tmp_path: Path) -> None:
    stock = build("bert", "Model")
    form = open_form(save_unchanged(tmp_path / "form", stock))
    with pytest.raises(ValueError, match="Either input_ids or inputs_embeds"):
        form(attention_mask=MASK)
    embedded = stock.embeddings.word_embeddings(TOKEN_IDS)
    given = {"inputs_embeds": embedded, "attention_mask": MASK, "position_ids": torch.arange(5, 25).unsqueeze(0)}
    assert relative_difference(form, stock, given) == 0


def test_the_modelling_file_stands_alone() -> None:
    """It imports nothing but torch, transformers and what transformers itself needs."""
    import ast

    from oneshot.export import modeling_oneshot_encoder

    assert modeling_oneshot_encoder.__file__ is not None
    tree = ast.parse(Path(modeling_oneshot_encoder.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    roots = {(name or "").partition(".")[0] for name in imported}
    assert roots == {"typing", "torch", "transformers", "huggingface_hub"}
