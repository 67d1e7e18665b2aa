"""The tasks of the package, names of tasks before any library is loaded, and tasks whose documents are not there."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint

import oneshot.tasks
from oneshot.errors import ConfigError
from oneshot.evaluation import load_model, run_tasks
from oneshot.tasks import builtin_tasks, expanded, refuse_unknown
from oneshot.text import load_tokenizer

FOLDER = Path(oneshot.tasks.__file__).parent
HUB_TASK = "task: remote\ndataset_path: nobody/nothing\noutput_type: multiple_choice\ntest_split: test\n"
HUB_TASK += "doc_to_text: a\ndoc_to_target: 0\ndoc_to_choice: [a, b]\n"


def documents(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", builtin_tasks())
def test_documents_differ_and_have_one_answer(name: str) -> None:
    rows = documents(name)
    assert 40 <= len({json.dumps(row) for row in rows}) == len(rows) <= 60
    words = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    for row in rows:
        choices = row.get("choices", ["one"])
        assert isinstance(choices, list)
        assert len(set(choices)) == len(choices)
        if name == "oneshot_arithmetic":
            left, word, right = str(row["question"]).split()
            assert choices[int(str(row["gold"]))] == str(words[word](int(left), int(right)))


def test_tasks_of_the_package_need_no_network_and_nothing_leaks(
    make_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """All by their common name, from a folder that is no repository of git; accuracy from our own likelihoods."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda *rest, **named: pytest.fail("the network was asked"))
    folder = make_checkpoint()
    evaluator = import_module("lm_eval.evaluator")
    before = evaluator.get_git_commit_hash
    results = run_tasks(folder, ["builtin"], limit=2, include_path=None, device=torch.device("cpu"), dtype="auto")
    assert results.keys() == set(builtin_tasks()) == set(expanded(["builtin", "oneshot_copy"]))
    assert "exact_match,none" in results["oneshot_copy"]
    told = capfd.readouterr().err
    assert "fatal" not in told
    assert "requests" not in told, "no bars of lm-eval in a file"
    assert not [record for record in caplog.records if record.name.startswith("lm_eval")]
    assert evaluator.get_git_commit_hash is before
    model, tokenizer = load_model(folder, device=torch.device("cpu"), dtype="auto"), load_tokenizer(folder)
    right = 0
    for row in documents("oneshot_facts")[:2]:
        context, choices, scores = f"Question: {row['question']}\nAnswer:", row["choices"], []
        assert isinstance(choices, list)
        for choice in choices:
            ids = tokenizer(f"{context} {choice}", return_tensors="pt").input_ids
            start = len(tokenizer(context).input_ids)
            with torch.inference_mode():
                log_p = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
            scores.append(float(log_p.gather(1, ids[0, start:, None]).sum()))
        right += scores.index(max(scores)) == row["gold"]
    assert results["oneshot_facts"]["acc,none"] == right / 2


def test_documents_that_cannot_be_fetched_are_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "remote.yaml").write_text(HUB_TASK)
    for error in (ConnectionError("Couldn't reach 'nobody/nothing'"), ValueError("Couldn't find cache for it")):

        def refuse(*rest: object, error: Exception = error, **named: object) -> None:
            raise error

        monkeypatch.setattr("datasets.load_dataset", refuse)
        with pytest.raises(ConfigError, match=r"--tasks remote cannot be loaded \(Couldn't .*--tasks builtin\.$"):
            run_tasks(tmp_path, ["remote"], limit=1, include_path=str(tmp_path), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("hellaswagg", "did you mean hellaswag?"),
        ("oneshot_fact", "did you mean oneshot_facts?"),
        ("qqqxyz", "the small tasks of --tasks builtin."),
    ],
)
def test_a_name_that_is_in_no_file_is_told_at_once(name: str, end: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--tasks {name} is not known to lm-eval.*") as refused:
        refuse_unknown(["piqa", name], None)
    assert str(refused.value).endswith(end)
    (tmp_path / "mine.yaml").write_text("group: qqqxyz\ntask: [piqa]\n")
    refuse_unknown(["qqqxyz", "piqa", "builtin"], str(tmp_path))


def test_the_command_looks_names_up_before_it_loads_libraries() -> None:
    code = "import sys; from oneshot.cli.main import main; print(main(['evaluate', 'none', '--tasks', 'qqqxyz']), "
    code += "{'torch', 'lm_eval', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 set()\n"
    assert done.stderr.startswith("error: --tasks qqqxyz is not known")
