"""Smaller hidden sizes of encoders: exact at full width, and the stock model with norms inside subspaces below it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_forms import (
    STOCK,
    TASKS,
    Tensors,
    fold_into_subspaces,
    inputs_of,
    layer_tensors,
    norm_tensors,
    norms_of,
    open_form,
    random_bases,
    relative_difference,
    save_form,
    stack_of,
)
from factories import build_model

from oneshot.compression.fold_post_norm import SubspaceNorm, fold_post_norm, fold_table, fold_tied_head

HIDDEN = 32
ALL = [(family, task) for family in STOCK for task in TASKS]


def build(family: str, task: str, **options: Any) -> Any:
    given: dict[str, Any] = {"layers": 2, "width": 48, "tied": True} | options
    return build_model(family, model_class=f"{STOCK[family]}{task}", **given)


def folded(stock: Any, bases: list[torch.Tensor], folder: Path) -> Any:
    tensors, shapes = fold_into_subspaces(stock, bases)
    return open_form(save_form(folder, stock, tensors, shapes, subspaces=True))


@pytest.mark.parametrize(("size", "centred"), [(HIDDEN, False), (HIDDEN - 1, True)], ids=["all", "mean-free"])
@pytest.mark.parametrize(("family", "task"), ALL)
def test_a_rotation_at_full_width_changes_nothing(
    family: str, task: str, size: int, centred: bool, tmp_path: Path
) -> None:
    """Every position has another random rotation."""
    stock = build(family, task)
    model = folded(stock, random_bases([size] * 5, HIDDEN, centred=centred), tmp_path / "form")
    assert relative_difference(model, stock, inputs_of(stock)) < 2e-5


@pytest.mark.parametrize("options", [{"tied": False}, {"layer_norm_eps": 0.5}])
def test_the_rotation_keeps_an_untied_head_and_epsilon(options: dict[str, Any], tmp_path: Path) -> None:
    stock = build("bert", "ForMaskedLM", **options)
    model = folded(stock, random_bases([HIDDEN] * 5, HIDDEN), tmp_path / "form")
    assert relative_difference(model, stock, inputs_of(stock)) < 2e-5


@pytest.mark.parametrize(("family", "task"), ALL)
def test_smaller_subspaces_are_the_stock_model_with_norms_inside_them(family: str, task: str, tmp_path: Path) -> None:
    stock = build(family, task)
    bases = random_bases([20, 26, 12, 31, 17], HIDDEN)
    model = folded(stock, bases, tmp_path / "form")
    put_inside(stock, bases)
    if task == "ForMaskedLM":
        embed_inside_decoder(stock, bases[0])
    assert relative_difference(model, stock, inputs_of(stock)) < 2e-5


def put_inside(stock: Any, bases: list[torch.Tensor]) -> None:
    """Replace the LayerNorms of a stock model."""
    for (module, name), basis in zip(norms_of(stock), bases, strict=True):
        norm = getattr(module, name)
        setattr(module, name, SubspaceNorm(norm, basis))


def embed_inside_decoder(stock: Any, basis: torch.Tensor) -> None:
    """Untie the decoder and keep its rows, apart from their means, in the embedding's subspace."""
    decoder = stock.get_output_embeddings()
    rows = decoder.weight.detach().double()
    means = rows.mean(1, keepdim=True)
    decoder.weight = torch.nn.Parameter(((rows - means) @ basis @ basis.T + means).float())


def test_left_out_sublayers_pass_the_stream_on(tmp_path: Path) -> None:
    """Without heads or neurons the writer's bias, the residual and the norm stay."""
    stock = build("distilbert", "Model")
    stack, norms = stack_of(stock), norm_tensors(stock)
    bases = random_bases([20, 26, 12], HIDDEN)
    whole = layer_tensors(stock, 0)
    readers = (*stack.attention.readers, *stack.ffn.readers)
    writers = (stack.attention.out, stack.ffn.out)
    without = {
        name: tensor[:0] if name.startswith(readers) else tensor[:, :0] if name.endswith("weight") else tensor
        for name, tensor in whole.items()
        if "norm" not in name
    }
    kept = {name: tensor for name, tensor in whole.items() if "norm" in name}
    found = fold_post_norm(without | kept, stack, norms[0], bases)
    shortcuts = {f"{sublayer.shortcut}.weight" for sublayer in stack.sublayers}
    assert found.keys() == shortcuts | {f"{writer}.bias" for writer in writers}
    complete = fold_post_norm(whole, stack, norms[0], bases)
    assert all(torch.equal(tensor, complete[name]) for name, tensor in found.items())


@pytest.mark.parametrize("family", list(STOCK))
def test_folded_tensors_equal_the_equations(family: str) -> None:
    """SP3 equations 5 to 8 and 18 in NumPy, for the second layer."""
    stock = build(family, "Model")
    stack, norms, dense = stack_of(stock), norm_tensors(stock), layer_tensors(stock, 1)
    bases = random_bases([20, 26, 12], HIDDEN)
    found = fold_post_norm(dense, stack, norms[2], bases)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    arrays = {name: tensor.double().numpy() for name, tensor in dense.items()}
    centring = np.eye(HIDDEN) - np.full((HIDDEN, HIDDEN), 1 / HIDDEN)
    expected: dict[str, Any] = {}
    for index, sublayer in enumerate(stack.sublayers):
        gamma, beta = (norms[2 + index][part].double().numpy() for part in ("weight", "bias"))
        basis, after = bases[index].numpy(), bases[index + 1].numpy()
        for linear in sublayer.readers:
            weight, bias = arrays[f"{linear}.weight"], arrays[f"{linear}.bias"]
            expected[f"{linear}.weight"] = weight @ np.diag(gamma) @ basis
            expected[f"{linear}.bias"] = bias + weight @ beta
        into = after.T @ centring
        expected[f"{sublayer.writer}.weight"] = into @ arrays[f"{sublayer.writer}.weight"]
        expected[f"{sublayer.writer}.bias"] = into @ arrays[f"{sublayer.writer}.bias"] + into @ beta
        expected[f"{sublayer.shortcut}.weight"] = into @ np.diag(gamma) @ basis
    assert_tensors_equal(found, expected)


def assert_tensors_equal(found: Tensors, expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name].numpy(), array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_embeddings_and_the_tied_head_lose_nothing_at_full_width() -> None:
    table = torch.randn(50, HIDDEN, dtype=torch.float64) + 3
    [basis], states = random_bases([HIDDEN - 1], HIDDEN, centred=True), torch.randn(7, HIDDEN, dtype=torch.float64)
    stored = fold_table(table, basis)
    head = fold_tied_head(table, basis)
    logits = states @ head["head_map"].double().T @ stored.T + states.sum(1, keepdim=True) * head["row_means"]
    np.testing.assert_allclose(logits, states @ table.T, rtol=1e-5, atol=1e-5)


def test_subspace_norms_equal_layer_norms_at_full_width_and_keep_half_precision() -> None:
    norm = torch.nn.LayerNorm(HIDDEN, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    [basis] = random_bases([HIDDEN], HIDDEN)
    total = 5 * torch.randn(4, 6, HIDDEN) + 7
    found = SubspaceNorm(norm, basis)(total)
    torch.testing.assert_close(found, norm(total), rtol=1e-5, atol=2e-5)
    half = SubspaceNorm(norm.bfloat16(), basis)(total.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), found, rtol=5e-2, atol=5e-2)
    large = 300 * torch.randn(4, HIDDEN)  # squares are above float16's largest number
    normed = SubspaceNorm(norm.half(), basis)(large.half())
    torch.testing.assert_close(normed.float(), norm.float()(large), rtol=2e-2, atol=2e-2)
