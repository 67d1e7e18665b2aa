"""`oneshot chat`: the answers equal the stock class's, turn by turn."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from oneshot.cli.main import main

LENGTH = 6


def stock_answers(folder: Path, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Return what transformers writes to these prompts, greedily, in one conversation; `…` where it is cut."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    turns: list[dict[str, str]] = []
    answers = []
    for prompt in prompts:
        turns.append({"role": "user", "content": prompt})
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        length = inputs["input_ids"].shape[1]
        answers.append(tokenizer.decode(written[0, length:], skip_special_tokens=True))
        turns.append({"role": "assistant", "content": answers[-1].strip()})
        if written.shape[1] - length == LENGTH and written[0, -1] != tokenizer.eos_token_id:
            answers[-1] += " …"
    return answers


@pytest.mark.parametrize("typed", [False, True], ids=["--prompt", "typed"])
def test_answers_are_the_stock_models_turn_by_turn(
    make_checkpoint: MakeCheckpoint,
    tokenizer: Any,
    typed: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, prompts = make_checkpoint(), ["the first of them", "and the second"]
    expected = stock_answers(folder, tokenizer, prompts)
    assert all(answer.endswith(" …") for answer in expected)
    options = [str(folder), f"--max-new-tokens={LENGTH}", "--device=cpu", "--dtype=float32"]
    if typed:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(prompts) + "\n"))
    else:
        options += [f"--prompt={prompt}" for prompt in prompts]
    capsys.readouterr()
    assert main(["chat", *options]) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in expected)


@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("typed", ["strict", "surrogateescape", None])
def test_a_prompt_that_is_not_utf8_has_a_replacement(
    typed: str | None,
    has_template: bool,
    own_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`typed`: how the standard input decodes, as the locale has it; None: an argument."""
    folder, latin = own_checkpoint(), b"caf\xe9 is latin"
    if not has_template:
        (folder / "chat_template.jinja").unlink()
    options = ["chat", str(folder), "--max-new-tokens=3", "--device=cpu", "--dtype=float32"]
    if typed is None:
        assert main([*options, f"--prompt={os.fsdecode(latin)}"]) == 0
    else:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(latin + b"\n"), "utf-8", errors=typed))
        assert main(options) == 0
    assert capsys.readouterr().out.strip()


def test_an_empty_answer_is_named_and_is_no_turn(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint()
    monkeypatch.setattr(LlamaForCausalLM, "generate", lambda _, ids, *, streamer, **__: streamer.end() or ids)
    capsys.readouterr()
    assert main(["chat", str(folder), "--prompt=the first", "--prompt=the second", "--device=cpu"]) == 0
    assert capsys.readouterr().out == "(nothing)\n(nothing)\n"


def test_the_original_is_asked_the_same(make_checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint()
    options = [f"--baseline={folder}", "--prompt=the same", f"--max-new-tokens={LENGTH}", "--device=cpu"]
    assert main(["chat", str(folder), *options]) == 0
    _, one, other = capsys.readouterr().out.split(f"[{folder.name}]\n")
    assert one == other != "\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(["--max-new-tokens=0"], "--max-new-tokens 0 is too small"), (["--baseline=/none/here"], "/none/here")],
)
def test_wrong_options_are_one_sentence(
    make_checkpoint: MakeCheckpoint, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(make_checkpoint()), "--prompt=hello", "--device=cpu", *options]) == 1
    assert sentence in capsys.readouterr().err
