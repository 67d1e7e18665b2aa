"""A table that is stored twice is one table: counted once, pruned for once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from damage import edit_config, edit_tensors, message_of
from factories import ENCODERS, MakeCheckpoint, MakeConfig, build_model
from families.cases import CASES
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import open_model
from oneshot.errors import PlanError
from oneshot.evaluation.models import load_model
from oneshot.families import FAMILIES
from oneshot.pipeline import compress, predict

TOKEN_IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(1))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        values: torch.Tensor = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)(TOKEN_IDS).logits
    return values


def store_head(folder: Path, noise: float) -> Path:
    """Store a head beside the embedding, which differs from it by relative noise."""
    tensors = load_file(folder / "model.safetensors")
    table = tensors[EMBEDDING]
    random = torch.randn(table.shape, generator=torch.Generator().manual_seed(3))
    tensors[HEAD] = table + noise * table.norm() / random.norm() * random
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_equal_head_of_a_tied_model_is_dropped(
    own_checkpoint: MakeCheckpoint, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Every byte of the result, and every prediction, is the plain tied model's."""
    plain = make_config(make_checkpoint(tied=True), output=str(tmp_path / "plain"))
    twice = make_config(store_head(own_checkpoint(tied=True), 0.0), output=str(tmp_path / "twice"))
    assert predict(plain).stored_parameters == predict(twice).stored_parameters
    assert predict(plain).result_bytes == predict(twice).result_bytes
    compress(plain), compress(twice)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


@pytest.mark.parametrize("row", [0, 399])
def test_a_head_that_differs_in_one_number_stays(row: int, own_checkpoint: MakeCheckpoint) -> None:
    """Transformers does not tie such tables, so what is computed would change."""
    folder = store_head(own_checkpoint(tied=True), 0.0)
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD][row, 5] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = open_model(str(folder), folder)
    assert not model.shape.tied
    assert torch.equal(model.read_head(), tensors[HEAD])
    wanted = logits(folder)
    tensors[HEAD][row, 5] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert not torch.equal(logits(folder), wanted)  # transformers reads the head


def test_two_copies_are_named_and_tied_on_demand(
    save_model: Callable[..., Path], make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The head's copy stays, as the result of an untied model whose embedding is that copy."""
    model = build_model()
    random = torch.randn(400, 32, generator=torch.Generator().manual_seed(3))
    table = model.lm_head.weight.data
    model.model.embed_tokens.weight.data = table + 0.05 * table.norm() / random.norm() * random
    folder = save_model(model)
    apart = predict(make_config(folder))
    assert "differ by 5.0 %" in caplog.text
    assert "--tie" in caplog.text
    caplog.clear()
    config = make_config(folder, tie=True, sparsity=0.0)
    together = predict(make_config(folder, tie=True))
    assert together.stored_parameters["dense"] == apart.stored_parameters["dense"] - 400 * 32
    dense = together.stored_parameters["dense"]
    assert f"count from {dense:,} parameters, and the checkpoint has {dense + 400 * 32:,}" in caplog.text
    caplog.clear()
    compress(config)
    assert len(caplog.records) == 1
    model.model.embed_tokens.weight.data = table.clone()
    with torch.inference_mode():
        assert torch.equal(logits(Path(config.output)), model(TOKEN_IDS).logits)
    assert set(load_file(Path(config.output) / "model.safetensors")) == set(model.state_dict()) - {HEAD}


def masked_class(family: str) -> str:
    return next(name for name in FAMILIES[family].classes if name.endswith(("ForMaskedLM", "ConditionalGeneration")))


COPIES = [
    (family, copied, name)
    for family in (*ENCODERS, "t5")
    for copied, name in getattr(transformers, masked_class(family))._tied_weights_keys.items()
    if copied != FAMILIES[family].head
]


@pytest.mark.parametrize(("family", "copied", "name"), COPIES, ids=["-".join(one[:2]) for one in COPIES])
def test_a_copy_beside_a_tied_tensor_equals_it(family: str, copied: str, name: str, tmp_path: Path) -> None:
    """An equal one changes nothing. Another one is refused, as transformers computes with both."""
    options: dict[str, Any] = {"tied": True} | ({"model_class": masked_class(family)} if family in ENCODERS else {})
    CASES[family].build(**CASES[family].options | options).save_pretrained(tmp_path)
    plain = open_model(str(tmp_path), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({copied: tensors[name].clone()}))
    twice = open_model(str(tmp_path), tmp_path)
    assert (twice.shape, twice.checkpoint.shapes) == (plain.shape, plain.checkpoint.shapes)
    edit_tensors(tmp_path, lambda tensors: tensors[copied][399:].add_(1))
    message = message_of(tmp_path)
    assert f"{copied} is stored with other values than {name}, although config.json ties them; remove it" in message
    assert ("or state tie_word_embeddings false and store" in message) == (family in ENCODERS)
    if family in ENCODERS:
        model_class = getattr(transformers, masked_class(family))
        dense = model_class.from_pretrained(tmp_path).eval()
        tied = model_class._tied_weights_keys
        edit_tensors(
            tmp_path, lambda tensors: tensors.update({one: dense.get_parameter(one).data.clone() for one in tied})
        )
        edit_config(tmp_path, tie_word_embeddings=False)
        assert torch.equal(open_model(str(tmp_path), tmp_path).checkpoint.read_one(copied), dense.get_parameter(copied))
        untied = model_class.from_pretrained(tmp_path).eval()
        with torch.inference_mode():
            assert torch.equal(untied(TOKEN_IDS).logits, dense(TOKEN_IDS).logits)


@pytest.mark.parametrize(("tied", "sentence"), [(True, "stored beside"), (False, "differ by 1")])
def test_other_tables_are_not_tied(
    tied: bool,
    sentence: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make_checkpoint(tied=tied)
    predict(make_config(folder))
    assert "--tie" not in caplog.text
    with pytest.raises(PlanError, match=sentence):
        predict(make_config(folder, tie=True))
