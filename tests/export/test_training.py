"""Training steps of a result: they drop what they drop of the input, in the same places, with the same seed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from factories import ENCODERS, MakeConfig, build_model
from families.cases import CASES, decoders

from oneshot.errors import PlanError
from oneshot.families import BERT, FAMILIES
from oneshot.pipeline import compress

TOKEN_IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(1))
OURS = [name for name in decoders() if FAMILIES[name].like_llama]  # whose layers our own classes have
OTHERS = ["gemma3_text", "gpt2", "falcon"]  # whose stock class the result's is made from
TASKS = [(name, task) for name in ("bert", "distilbert") for task in FAMILIES[name].classes]
CENTRED = 0.3  # OPT drops coordinates of outputs that still have their mean


def dropping(model_type: str) -> dict[str, Any]:
    """Return the config's shares that a training step drops, each another."""
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    names = sorted(name for name in config if "drop" in name and name not in ("layerdrop", "summary_first_dropout"))
    return {name: 0.2 + 0.05 * place for place, name in enumerate(names)}


def step(model: Any, *, trains: bool) -> torch.Tensor:
    """Return the first output of a seeded forward pass."""
    torch.manual_seed(3)
    with torch.no_grad():
        output: torch.Tensor = model.train(trains)(TOKEN_IDS, return_dict=False)[0]
    return output


def assert_drops_as(result: Any, dense: Any, *, mean: bool = False) -> None:
    wanted, found = step(dense, trains=True), step(result, trains=True)
    assert float((step(result, trains=False) - found).norm() / found.norm()) > CENTRED
    if mean:
        assert float((found - wanted).norm() / wanted.norm()) < CENTRED
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_a_decoder_drops_what_its_stock_class_drops(
    name: str, save_model: Callable[..., Path], make_config: MakeConfig, tmp_path: Path
) -> None:
    """Compress by nothing into every form, and the per-layer result again."""
    dense = build_model(**CASES[name].options | dropping(name))
    folder = save_model(dense)
    for form in ("stock", "nemotron-nas", "per-layer"):
        config = make_config(folder, form=form, sparsity=0.0, output=str(tmp_path / form))
        try:
            compress(config)
        except PlanError:
            assert form == "nemotron-nas"
            continue
        result = transformers.AutoModelForCausalLM.from_pretrained(config.output, trust_remote_code=True)
        assert_drops_as(result, dense, mean=name == "opt" and form == "per-layer")
    if name != "opt":  # whose result is not an input
        again = make_config(tmp_path / "per-layer", form="per-layer", sparsity=0.0, output=str(tmp_path / "again"))
        compress(again)
        result = transformers.AutoModelForCausalLM.from_pretrained(again.output, trust_remote_code=True)
        assert_drops_as(result, dense)


@pytest.mark.parametrize("form", ["stock", "per-layer"])
@pytest.mark.parametrize(("name", "model_class"), TASKS)
def test_an_encoder_drops_what_its_stock_class_drops(
    name: str, model_class: str, form: str, save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    assert name in ENCODERS
    dense = build_model(name, model_class=model_class, **dropping(name))
    config = make_config(save_model(dense), form=form, sparsity=0.0)
    compress(config)
    task = model_class.removeprefix("Bert" if name == BERT.model_type else "DistilBert")
    auto_class = getattr(transformers, f"AutoModel{task.removeprefix('Model')}")
    assert_drops_as(auto_class.from_pretrained(config.output, trust_remote_code=True), dense)
