"""Classes whose number of heads must divide the hidden size: any number passes the stream, such ones are stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeConfig
from families.cases import CASES

from oneshot.checkpoint import Checkpoint
from oneshot.checkpoint.stock import reason_against_config, stock_config
from oneshot.evaluation import load_model
from oneshot.pipeline import compress, profile

# four heads of one group, beside a hidden size of 32, which three of them do not divide
ONE_GROUP = {"heads": 4, "groups": 1}
STRICT: dict[str, dict[str, int]] = dict.fromkeys(("gemma2", "gemma3_text", "arcee", "cwm"), ONE_GROUP)
STRICT["gemma3"] = {"num_key_value_heads": 1}  # as its text config names it


@pytest.fixture
def strict(save_model: Callable[[Any], Path]) -> Callable[[str], Path]:
    """Return what makes a checkpoint of a family."""

    def make(family: str) -> Path:
        case = CASES[family]
        return save_model(case.build(**case.options | STRICT[family]))

    return make


@pytest.mark.parametrize("family", STRICT)
def test_any_number_of_heads_passes_the_stream(
    family: str, strict: Callable[[str], Path], make_config: MakeConfig
) -> None:
    folder = strict(family)
    found = profile(make_config(folder, form="stock"))
    assert found.head_errors.isfinite().all()
    assert (found.head_sensitivity > 0).any()


@pytest.mark.parametrize("sparsity", [0.1, 0.2, 0.25])
@pytest.mark.parametrize("family", STRICT)
def test_a_stock_result_has_heads_that_its_class_accepts(
    family: str, sparsity: float, strict: Callable[[str], Path], make_config: MakeConfig
) -> None:
    config = make_config(strict(family), form="stock", heads="obs", sparsity=sparsity)
    compress(config)
    assert load_model(Path(config.output), device=torch.device("cpu"), dtype="auto").config.model_type == family


def test_a_config_with_other_heads_is_the_same_but_for_them(strict: Callable[[str], Path]) -> None:
    config = Checkpoint(strict("gemma3_text")).config
    for heads, accepted in ((4, True), (3, False), (2, True)):
        changed = config | {"num_attention_heads": heads}
        assert (reason_against_config(changed) is None) == accepted
        assert stock_config(changed).to_dict() == stock_config(config).to_dict() | {"num_attention_heads": heads}


def test_the_per_layer_form_holds_any_number(strict: Callable[[str], Path], make_config: MakeConfig) -> None:
    folder = strict("gemma3_text")
    config = make_config(folder, form="per-layer", heads="obs", ffn="none", embedding="none", sparsity=0.05)
    report = compress(config)
    assert any(layer["num_attention_heads"] == 3 for layer in report.plan["layers"])
    load_model(Path(config.output), device=torch.device("cpu"), dtype="auto")
