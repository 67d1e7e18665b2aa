"""Code of the guides runs as it is written, on tiny models."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from torch.nn import functional
from transformers import AutoModelForCausalLM

from oneshot.pipeline import compress

DOCS = Path(__file__).resolve().parent.parent / "docs"
TINY = {
    "max_steps=300": "max_steps=12",
    "train_batch_size=16": "train_batch_size=4",
    "5e-5": "3e-3",
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


def test_the_quick_start_from_python(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It begins with the GGUF file that `make setup` installs, as the page's other commands do."""
    config = make_config(make_checkpoint(), form="gguf", sparsity=0)
    compress(config)
    place = tmp_path / ".venv" / "lib" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    place.parent.mkdir(parents=True)
    place.symlink_to(Path(config.output) / "model.gguf")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code_of("quick-start.md", "From Python", **{"512": "32"}), names)
    assert names["smaller"].num_parameters() == names["result"].report.stored_parameters["compressed"]
    assert (tmp_path / "smaller-again" / "model.safetensors").exists()
    assert "parameters" in capsys.readouterr().out
