"""Tasks whose answers the model writes: against our own greedy loop, and the rows and the table made of them."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint
from rows import ShowRows, quality_row

from oneshot.cli.evaluate import main
from oneshot.evaluation import load_model, run_tasks
from oneshot.text import load_tokenizer

CPU = torch.device("cpu")
CONTEXTS = ("She looked at the sea, and the sea looked back at", "He raised his brows when he saw the", "one two three")
SENTENCES = (
    {"context_options": ["The cup was in the box so the cup", "The cup was in the box so the box"]}
    | {"continuation": "was full.", "gold": 1},
    {"context_options": ["Sarah met Maria, so Sarah", "Sarah met Maria, so Maria"], "continuation": "ran.", "gold": 0},
    {"context_options": ["A", "B"], "continuation": "is it.", "gold": 0},
)


def write_lines(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@torch.inference_mode()
def greedy(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Return what a model writes, one whole forward pass for each token."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    length = ids.shape[1]
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    text: str = tokenizer.decode(ids[0, length:], skip_special_tokens=True)
    return text


def first_word(text: str) -> str:
    """Return the first run of letters, without regular expressions."""
    letters = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()
    return letters[0] if letters else ""


@pytest.fixture
def include_path(judging: ModuleType, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """Passages of which a tiny model writes the first one's last word, and not the others'."""
    folder = make_checkpoint()
    model, tokenizer = load_model(folder, device=CPU, dtype=torch.float32), load_tokenizer(folder)
    words = [first_word(greedy(model, tokenizer, context, 8)) for context in CONTEXTS]
    assert words[0], "the case is not trivial"
    lasts = [f"\n“{words[0]}", "no-such-word", words[2].swapcase() + "x"]
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    rows = [{"context": context, "continuation": last} for context, last in zip(CONTEXTS, lasts, strict=True)]
    write_lines(data_dir / "lambada_openai.jsonl", rows)
    write_lines(data_dir / "winogrande.jsonl", SENTENCES)
    path: Path = judging.local_tasks(data_dir, tmp_path)
    return path


def test_the_last_word_is_that_of_a_greedy_loop(make_checkpoint: MakeCheckpoint, include_path: Path) -> None:
    results = run_tasks(
        make_checkpoint(), ["lambada_greedy"], limit=None, include_path=str(include_path), device=CPU, dtype="float32"
    )
    assert results["lambada_greedy"]["exact_match,first_word"] == pytest.approx(1 / 3)
    assert results["lambada_greedy"]["exact_match_stderr,first_word"] > 0


def test_a_copy_is_the_whole_line(
    make_checkpoint: MakeCheckpoint, include_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictated model: what it is asked, and which of its answers are right."""
    from lm_eval.models.huggingface import HFLM

    prompts: list[str] = []
    answers = (
        " The cup was in the box so the box was full. ",  # right but for spaces
        " Sarah met Maria, so Sarah ran. It rained.",  # goes on
        " a is it.",  # another letter
    )

    def dictate(self: Any, instances: list[Any], *rest: Any, **named: Any) -> list[str]:
        prompts.extend(instance.args[0] for instance in instances)
        assert all(instance.args[1]["until"] == ["\n"] for instance in instances)
        assert not any(instance.args[1]["do_sample"] for instance in instances)
        return list(answers)

    monkeypatch.setattr(HFLM, "generate_until", dictate)
    results = run_tasks(make_checkpoint(), ["copy_sentence"], limit=None, include_path=str(include_path), device=CPU)
    assert results["copy_sentence"]["exact_match,line"] == pytest.approx(1 / 3)
    assert [prompt.rpartition("\n\n")[2] for prompt in prompts] == [
        "Sentence: The cup was in the box so the box was full.\nCopy:",
        "Sentence: Sarah met Maria, so Sarah ran.\nCopy:",
        "Sentence: A is it.\nCopy:",
    ]
    examples = prompts[0].split("\n\n")[:-1]
    assert len(examples) == 2
    for example in examples:
        given, copy = example.split("\n")
        assert given.removeprefix("Sentence: ") == copy.removeprefix("Copy: ")


def test_evaluate_shows_exact_match(
    make_checkpoint: MakeCheckpoint, include_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = make_checkpoint(), tmp_path / "numbers.json"
    command = [str(folder), "--baseline", str(folder), "--tasks", "lambada_greedy", "--include-path", str(include_path)]
    command += ["--decode-tokens", "0", "--device", "cpu", "--dtype", "float32", "--output", str(output)]
    assert main(command) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "lambada_greedy exact match" in line)
    assert re.findall(r"\d\.\d+", line) == [*["0.3333"] * 4, "1.000"], "values, standard errors, and the retention"
    numbers = json.loads(output.read_text())["evaluations"]
    assert [one["tasks"]["lambada_greedy"]["exact_match,first_word"] for one in numbers] == [pytest.approx(1 / 3)] * 2


def row(recipe: str, tasks: dict[str, dict[str, float]], **changes: Any) -> dict[str, Any]:
    return quality_row(recipe, **{"tasks": tasks, "task_limit": 100} | changes)


def results(written: tuple[float, float], chosen: tuple[float, float]) -> dict[str, dict[str, float]]:
    return {
        "lambada_greedy": {"exact_match,first_word": written[0], "exact_match_stderr,first_word": 0.03},
        "copy_sentence": {"exact_match,line": written[1], "exact_match_stderr,line": 0.04},
        "piqa": {"acc,none": 0.9, "acc_stderr,none": 0.9, "acc_norm,none": chosen[0], "acc_norm_stderr,none": 0.03},
        "boolq": {"acc,none": chosen[1], "acc_stderr,none": 0.04},
    }


def test_retention_is_the_share_of_the_dense_values(judging: ModuleType) -> None:
    dense = row("dense", results((0.4, 0.5), (0.6, 0.0)))
    small = row("oneshot", results((0.1, 0.25), (0.57, 0.6)))
    assert judging.retention(small, dense) == {
        "retention": pytest.approx({"piqa": 0.95, "lambada_greedy": 0.25, "copy_sentence": 0.5})
    }, "without boolq, where the dense model has 0"
    assert judging.retention({}, dense) == {}
    assert judging.task_values(dense["tasks"], "chosen") == {"piqa": (0.6, 0.03), "boolq": (0.0, 0.04)}


def test_table_of_written_answers(show_rows: ShowRows) -> None:
    compressed = {"form": "stock", "settings": {}, "asked": 0.2, "score": 2.0, "calibration": "general.jsonl"}
    compressed |= {"calibration_tokens": 131072, "worst": "piqa", "worst_ratio": 2.5}
    dense = row("dense", results((0.4, 0.6), (0.6, 0.4)), sparsity=0.0, stored_parameters=10**8, sequence_length=1024)
    dense |= {"calibration_tokens": None, "mean_accuracy": 0.5}
    small = row("oneshot", results((0.1, 0.3), (0.5, 0.4)), **compressed, mean_accuracy=0.45)
    other = row("flap", results((0.1, 0.3), (0.5, 0.4)), **compressed | {"task_limit": 10, "mean_accuracy": 0.45})
    newer = row("oneshot", {}, **compressed | {"score": 1.5})
    show_rows([dense, small, other, newer])
    table = importlib.import_module("tables.tasks").written_table()
    lines = table.splitlines()
    assert lines[0].endswith("| lambada_greedy | copy_sentence | mean, written | mean, chosen |")
    assert lines[2] == "| 0 | dense | – | – | – | 40.0% (100%) | 60.0% (100%) | 50.0% (100%) | 50.0% (100%) |"
    assert lines[3] == (
        "| 20.0% | oneshot | stock | – | general.jsonl | 10.0% (25%) | 30.0% (50%) | 20.0% (40%) | 45.0% (90%) |"
    )
    assert "flap" not in table, "other documents"
    assert "written answers' mean 2.5 points, of the chosen ones' 2.5" in table
    scores = importlib.import_module("tables.quality").quality_table().splitlines()
    assert any("| **oneshot** |" in line and "| 1.50 |" in line and line.endswith("| 45.0% |") for line in scores)


def test_table_of_acceptance(show_rows: ShowRows, judging: ModuleType) -> None:
    """Check that the newest rows with tasks are shown, by form and size, and that code is outside of the mean."""
    made = {"device": "CPU", "threads": 1, "commit": "abc", "dirty": False, "model": "M"}
    dense = made | {"recipe": "dense", "tasks": {"oneshot_copy": 0.75}}
    small = made | {"recipe": "oneshot", "form": "stock", "asked": 0.2, "score": 1.5, "code_ratio": 2.0}
    small |= {"sequence_length": 1024, "calibration": "a.jsonl", "calibration_tokens": 8192}
    accepted = dict.fromkeys(judging.KINDS, 0.5) | {"wikitext2": 0.75, "code": 0.25}
    small |= {"acceptance": accepted, "tasks": {"oneshot_copy": 0.5}}
    rows = [dense, small | {"score": 3.0}, small, small | {"form": "per-layer"}, made | {"recipe": "oneshot"}]
    show_rows([], little_text=rows)
    lines = importlib.import_module("tables.tasks").acceptance_table().splitlines()
    assert lines[2:5] == [
        "| dense | 0 | 1 | 1 | 1 | 1 | 75% |",
        "| per-layer | 20% | 1.500 | 2.000 | 0.55 | 0.25 | 50% |",
        "| stock | 20% | 1.500 | 2.000 | 0.55 | 0.25 | 50% |",
    ]
