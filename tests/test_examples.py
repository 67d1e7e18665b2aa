"""The programs and the notebook of `examples/` run on tiny models, and say what they are written to show."""

import json
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, stored_numbers
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
Run = Callable[..., str]
LENGTHS = ("--num-sequences=16", "--sequence-length=32")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(name, *arguments)` runs a program in an empty folder, and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: Any) -> str:
        spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return run


def open_folder(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)


@pytest.mark.parametrize("program", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_is_short_and_names_a_model_of_the_hub(program: Path) -> None:
    text = program.read_text()
    assert len(text.splitlines()) <= 60
    assert '"model", nargs="?", default="' in text
    assert f"python examples/{program.name} " in text


def test_a_chat_model_answers_before_and_after(
    run: Run, make_checkpoint: MakeCheckpoint, text_file: Path, other_text_file: Path
) -> None:
    dense = make_checkpoint()
    printed = run("chat_model", dense, f"--text={text_file}", f"--held-out={other_text_file}", *LENGTHS)
    assert open_folder("smaller-chat").num_parameters() < open_folder(dense).num_parameters()
    before, after = printed.index("before: "), printed.index("after: ")
    assert before < after < printed.index("perplexity", after)


def test_a_mixture_is_predicted_and_loses_neurons_of_experts(
    run: Run, make_checkpoint: MakeCheckpoint, text_file: Path, other_text_file: Path
) -> None:
    dense = make_checkpoint(family="qwen3_moe", moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    printed = run("mixture", dense, f"--text={text_file}", f"--held-out={other_text_file}", *LENGTHS)
    assert json.loads(Path("smaller-mixture/config.json").read_text())["moe_intermediate_size"] < 32
    assert "perplexity" in printed


@pytest.mark.parametrize(("form", "adapters"), [("per-layer", True), ("stock", False)])
def test_a_healed_model_is_served_as_it_was_trained(
    run: Run, make_checkpoint: MakeCheckpoint, text_file: Path, form: str, adapters: bool
) -> None:
    """The folder that the printed command serves opens by transformers, and is not the untrained result."""
    options = ["--steps=2", f"--form={form}", *["--lora"] * adapters]
    printed = run("heal_and_serve", make_checkpoint(), f"--text={text_file}", *options)
    assert "vllm serve healed" in printed.partition("serve it: ")[2]
    trained, untrained = (open_folder(name) for name in ("healed", "healed-untrained"))
    changed = [name for name, tensor in trained.state_dict().items() if not tensor.equal(untrained.state_dict()[name])]
    assert changed
    assert Path("healed/tokenizer.json").is_file()


def test_the_notebook_is_valid_and_without_outputs() -> None:
    """What nbformat 4.5 requires of a notebook and its cells, by its JSON schema."""
    notebook = json.loads((EXAMPLES / "first_result.ipynb").read_text())
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    required = {"id", "cell_type", "metadata", "source"}
    for cell in notebook["cells"]:
        of_code = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == required | of_code
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_the_notebook_runs(
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its code cells run in their order, with a tiny model in the place of the hub's."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "first_result.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    exec(cells[0], names)
    assert names["MODEL"].count("/") == 1
    names["MODEL"] = str(make_checkpoint())
    names["OPTIONS"] |= {"num_sequences": 16, "sequence_length": 32}
    for cell in cells[1:]:
        exec(cell, names)
    printed = capsys.readouterr().out
    assert printed.index("before:") < printed.index("after:")
    assert stored_numbers(open_folder("first-result")) == names["result"].report.stored_parameters["compressed"]
