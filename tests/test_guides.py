"""Code of the guides runs as it is written, on tiny models."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, stored_numbers
from torch.nn import functional
from transformers import AutoModelForCausalLM

from oneshot.cli.compress import build_parser as compress_parser
from oneshot.cli.main import main
from oneshot.pipeline import compress

DOCS = Path(__file__).resolve().parent.parent / "docs"
TINY = {
    "max_steps=300": "max_steps=12",
    "train_batch_size=16": "train_batch_size=4",
    "5e-5": "1e-3",
    "warmup_steps=30": "warmup_steps=1",
    "256": "32",
}


def code_of(page: str, section: str = "", **changes: str) -> str:
    """Return the Python code of a page or of what follows a heading, with other words."""
    text = (DOCS / page).read_text()
    chosen = re.split(r"^#+ ", text.partition(f"# {section}\n")[2], flags=re.MULTILINE)[0] if section else text
    code = "\n".join(re.findall(r"```python\n(.*?)```", chosen, re.DOTALL))
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    return code


def divergence(dense: Path, result: Path, rows: torch.Tensor) -> float:
    """Return the mean over tokens of KL(dense ‖ result)."""
    models = [AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) for folder in (dense, result)]
    with torch.no_grad():
        target, own = (model(rows).logits.log_softmax(-1).flatten(0, 1) for model in models)
    return float(functional.kl_div(own, target, log_target=True, reduction="batchmean"))


def loss(result: Path, rows: torch.Tensor) -> float:
    model = AutoModelForCausalLM.from_pretrained(result, trust_remote_code=True)
    with torch.no_grad():
        return float(model(rows, labels=rows).loss)


@pytest.fixture
def result(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A per-layer result in a working folder that has the names of the guides."""
    (tmp_path / "CHECKPOINT").symlink_to(make_checkpoint())
    (tmp_path / "my_text.txt").write_text(text_file.read_text()[:20_000])
    config = make_config(make_checkpoint(), output=str(tmp_path / "OUT"), form="per-layer", sparsity=0.2)
    compress(config)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "OUT"


def test_every_way_of_training_brings_something(result: Path) -> None:
    """Trained results are on the disk, can be opened, and are better at what they were trained for."""
    found: dict[str, Any] = {}
    exec(code_of("guides/heal.md", **TINY), found)
    rows = found["rows"]
    for trained in ("healed", "adapted"):
        assert loss(result.parent / trained, rows) < loss(result, rows)
    dense = result.parent / "CHECKPOINT"
    assert divergence(dense, result.parent / "distilled", rows) < divergence(dense, result, rows)
    assert (result.parent / "adapted" / "tokenizer.json").is_file()


def test_a_result_is_a_draft(result: Path) -> None:
    """What the dense model writes with it is what it writes alone."""
    found: dict[str, Any] = {}
    exec(code_of("engines.md", "A result as a draft"), found)
    alone = found["model"].generate(**found["inputs"], do_sample=False, max_new_tokens=40)
    assert torch.equal(found["written"], alone)


def commands_of(page: str) -> list[list[str]]:
    """Return the words of every command of ours on a page."""
    blocks = re.findall(r"```\n(.*?)```", (DOCS / page).read_text().replace("\\\n", " "), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("oneshot ")]


def test_the_quick_start(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It begins with a GGUF file, has the same options in the prediction, the run and Python, and every command runs.

    The result of Python stands in for the run's, which differs in nothing.
    """
    predict, run, chat, evaluate = commands_of("quick-start.md")
    assert predict == [*run, "--dry-run"]
    config = make_config(make_checkpoint(), form="gguf", sparsity=0)
    compress(config)
    place = tmp_path / ".venv" / "lib" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    place.parent.mkdir(parents=True)
    place.symlink_to(Path(config.output) / "model.gguf")
    (tmp_path / "README.md").write_text((DOCS.parent / "README.md").read_text())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code_of("quick-start.md", "From Python", **{"256": "32"}), names)
    assert main([word.replace("$MODEL", str(place)) for word in predict]) == 0
    (tmp_path / "smaller").symlink_to("smaller-again")
    given = vars(compress_parser().parse_args(run[1:]))
    options = names["options"] | {"sequence_length": 256, "sparsity": ["0.2"]}
    assert {name: given[name] for name in options} == options
    assert stored_numbers(names["smaller"]) == names["result"].report.stored_parameters["compressed"]
    assert "parameters" in capsys.readouterr().out
    for command in ([*chat, "--max-new-tokens=8"], [*evaluate, "--decode-tokens=0"]):
        assert main([word.replace("$MODEL", str(place)) for word in command]) == 0
    exec(code_of("quick-start.md", "4. Ask and measure"), names)
    assert names["model"].num_parameters() == names["smaller"].num_parameters()
