"""Errors in Python speak of arguments and of what was given, not of flags and temporary files."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, build_model

import oneshot
from oneshot.api.words import in_words_of_python
from oneshot.cli.main import main
from oneshot.errors import CalibrationError, OneshotError

SCRATCH = Path("/tmp/oneshot-x/files")
LONG = "Someone gives the text itself, and not the name of a file. " * 20
SENTENCES = {
    "--sparsity 1.2 is out of range: give a fraction.": "sparsity=1.2 is out of range: give a fraction.",
    "choose another --output or add --overwrite.": "choose another output or add overwrite=True.",
    "add --set ffn=id, or --form per-layer.": "add ffn='id', or form='per-layer'.",
    "ask for --sparsity 0.323 or less, or --set damping=1e-3.": "ask for sparsity=0.323 or less, or damping=1e-3.",
    "--form per-leyer is not one of stock.": "form='per-leyer' is not one of stock.",
    "--device cuda:7 is not there; use --device cpu.": "device='cuda:7' is not there; use device='cpu'.",
    "give a text as --calibration, or more --max-memory.": "give a text as calibration, or more max_memory.",
    "allow --max-memory 653MiB.": "allow max_memory='653MiB'.",
    f"{SCRATCH}/given-text.jsonl is short.": "The given text is short.",
    f"It reads {SCRATCH}/given-tokens.safetensors.": "It reads the given text.",
    f"The folder {SCRATCH}/LlamaForCausalLM lacks it.": "The folder the given model lacks it.",
}
WRONG: dict[str, dict[str, Any]] = {
    "few rows": {"calibration": torch.ones(4, 8).long(), "sequence_length": 16},
    "few words": {"calibration": ["a few words"]},
    "unknown tokens": {"calibration": torch.full((4, 8), 4000)},
    "range": {"sparsity": 1.5},
    "reach": {"sparsity": 0.9},
    "word": {"form": "per-leyer"},
    "length": {"sequence_length": 1},
    "memory": {"max_memory": "1MB"},
    "folder": {"offload_dir": "/no/such/folder"},
    "device": {"device": "cuda:77"},
}


@pytest.mark.parametrize(("told", "wanted"), SENTENCES.items())
def test_flags_become_arguments(told: str, wanted: str) -> None:
    assert in_words_of_python(told, SCRATCH) == wanted


@pytest.mark.parametrize("name", WRONG)
def test_no_flag_and_no_temporary_file_is_named(name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    options = {"sparsity": 0.2, "calibration": "builtin", "progress": False, "device": "cpu"} | WRONG[name]
    with pytest.raises(OneshotError) as refused:
        oneshot.compress(make_checkpoint(), tmp_path / "out", **options)
    assert not re.search(r"--[a-z]|given-|/files/", str(refused.value)), refused.value
    assert not re.search(r"--[a-z]|given-|/files/", refused.value.args[0])


def test_a_model_in_memory_has_no_temporary_name(tmp_path: Path) -> None:
    with pytest.raises(OneshotError, match=r"[Tt]he given model") as refused:
        oneshot.compress(build_model(layers=1), tmp_path / "out", sparsity=0.1, calibration="builtin", progress=False)
    assert "/files/" not in str(refused.value)


@pytest.mark.parametrize("text", [LONG, f"{LONG}+{LONG}", "one line\nand two", f"/ {LONG}"], ids=range(4))
def test_a_text_in_place_of_a_name_is_one_short_sentence(
    text: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    for measure in (oneshot.compress, oneshot.predict, oneshot.evaluate):
        given: dict[str, Any] = (
            {"text": text} if measure is oneshot.evaluate else {"calibration": text, "sparsity": 0.2}
        )
        with pytest.raises(CalibrationError, match=r"in Python into a list of strings|check the path") as refused:
            measure(make_checkpoint(), **given)
        assert len(str(refused.value)) < 400


def test_a_recipe_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "nosuch.yaml", tmp_path):
        assert main(["compress", "--config", str(path)]) == 1
        error = capsys.readouterr().err
        assert error == f"error: {path} is not a file; give a recipe file, such as the one that oneshot init writes.\n"
