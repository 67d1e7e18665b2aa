"""Errors in Python speak of arguments and of what was given, not of flags and temporary files."""

import logging
import re
from collections.abc import Callable
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
    "leave out --set value_size and inner_sizes.": "leave out value_size and inner_sizes.",
    "give a larger --set damping=": "give a larger damping",
    "--set heads=True is of the type bool.": "heads=True is of the type bool.",
    "--set overwrite='yes' is of the type str.": "overwrite='yes' is of the type str.",
    "--set keep=[3] is of the type list.": "keep=[3] is of the type list.",
    "sparsty is not an option, see --help and --help-methods; did you mean sparsity?": "sparsty is not an option, see "
    "help(oneshot.compress) and oneshot.RECIPES; did you mean sparsity?",
    "start anew: oneshot compress 'my models/a' --form per-layer --sparsity 0.36.": "start anew: "
    "oneshot.compress('my models/a', form='per-layer', sparsity=0.36).",
    "run oneshot evaluate or --dry-run.": "run oneshot evaluate or dry_run.",
    f"{SCRATCH}/given-text.jsonl is short.": "The given text is short.",
    f"It reads {SCRATCH}/given-tokens.safetensors.": "It reads the given text.",
    f"The folder {SCRATCH}/LlamaForCausalLM lacks it.": "The folder the given model lacks it.",
    f"{SCRATCH}/Llama lacks it. {SCRATCH}/model/Llama also.": "The given model lacks it. The given model also.",
    f"{SCRATCH}/Llama does not hold a tokenizer; copy the model's tokenizer files there.": "The given model does not "
    "hold a tokenizer; give one as the argument tokenizer.",
    f"The tokenizer in {SCRATCH}/Llama cannot be read (a; b); copy the model's files again.": "The tokenizer in the "
    "given model cannot be read (a; b); give another as the argument tokenizer.",
    "/models/Llama does not hold a tokenizer; copy the model's tokenizer files there.": "/models/Llama does not hold "
    "a tokenizer; copy the model's tokenizer files there.",
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


FEW: dict[str, Any] = {"sparsity": 0.2, "form": "stock", "num_sequences": 4, "sequence_length": 16}
FEW |= {"progress": False, "device": "cpu"}


@pytest.mark.parametrize("has_logging", [False, True], ids=["no logging", "logging"])
def test_warnings_name_arguments_and_are_seen(
    has_logging: bool,
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by a program that has set up no logging: Python is silent then as soon as anything listens."""
    heard: list[str] = []
    listener = logging.Handler()
    monkeypatch.setattr(listener, "emit", lambda record: heard.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("oneshot"), "handlers", [listener] * has_logging)
    text = ["Words of a text in memory, which is long enough."] * 40
    result = oneshot.compress(make_checkpoint(), tmp_path / "out", calibration=text, **FEW | {"sparsity": 0.1})
    (few,) = result.report.warnings
    assert "such as num_sequences=16 of 16 tokens each" in few
    assert heard == [few] * has_logging
    assert capsys.readouterr().err == ("" if has_logging else f"WARNING: {few}\n")
    assert logging.getLogger("oneshot").handlers == [listener] * has_logging


def test_a_question_is_asked_at_the_end(make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path) -> None:
    told: list[str] = []
    options = FEW | {"sparsity": [0.1, 0.2], "progress": lambda progress: told.append(progress.stage)}
    text = text_file.read_text().split("\n\n")
    results = oneshot.compress(make_checkpoint(), tmp_path / "out", calibration=text, prompt="Who?", **options)
    for result in results:
        check = result.report.check
        assert check is not None
        assert (check.question, set(check.answers)) == ("Who?", {"dense", "compressed"})
        assert check.perplexity is not None
        shown = repr(result)
        assert "tokens of given-text.jsonl that the run did not read" in shown
        assert re.search(r"\n  asked: +Who\?\n  before: ", shown)
        assert "Who?" in (result.output / "report.html").read_text()
    assert told[-1] == "checking the result"
    for prompt in (" ", 3):
        with pytest.raises(OneshotError, match=r"^prompt is .*; give a question, or leave it out"):
            oneshot.compress(make_checkpoint(), tmp_path / "no", calibration=text, prompt=prompt, **options)
    assert not (tmp_path / "no").exists()


def test_a_model_in_memory_without_a_tokenizer_is_refused_with_the_argument(tmp_path: Path) -> None:
    """In every call that takes one, also of a model from a folder without a tokenizer."""
    stored = build_model(layers=1)
    stored.save_pretrained(tmp_path / "bare")
    loaded = type(stored).from_pretrained(tmp_path / "bare")
    options: dict[str, Any] = {"calibration": "builtin", "device": "cpu", "progress": False}
    for model in (stored, loaded):
        calls: list[Callable[[], Any]] = [
            lambda model=model: oneshot.compress(model, tmp_path / "out", sparsity=0.1, **options),
            lambda model=model: oneshot.profile(model, tmp_path / "out", **options),
            lambda model=model: oneshot.evaluate(model, "builtin"),
        ]
        for call in calls:
            with pytest.raises(CalibrationError, match=r"^The given model does not hold a tokenizer; give one as the"):
                call()


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
