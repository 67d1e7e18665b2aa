"""The real SmolLM2-135M: compressed, loaded by stock transformers, generating, measured, and run through lm-eval."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oneshot import Config, Report
from oneshot.evaluation import evaluate, load_model, load_windows, perplexity
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer

CPU = torch.device("cpu")
pytestmark = pytest.mark.long

# Plain English, unlike the technical prose of the calibration text. Written for this test.
STORY = """
The old lighthouse keeper climbed the stairs every evening, just before the sun went down. He had done so for thirty
years, and he knew each of the steps by the sound that it made under his boots. On clear nights he could see the lights
of the town across the bay, where his daughter lived with her two children. On other nights there was only the fog, and
the slow beam that swept over the water.

One morning in October a small boat came to the island. A young woman was in it, and she carried a letter from the
harbour office. The lighthouse, it said, would be run by a machine from now on. The keeper read the letter twice. Then
he made tea for both of them, and they sat on the wall in the sun and looked at the sea.

"What will you do now?" she asked him. He thought about it for a long time. He had never liked the town very much. There
were too many people, and all of them seemed to be in a hurry. But his grandchildren were growing up, and he had told
them stories about the island for so long that he had begun to forget which of them were true.

In the end he took the boat back with her. He brought a suitcase, a radio and the brass clock from the kitchen. When
they reached the harbour it was already dark. He turned around once, and there it was: the beam, moving over the water
exactly as it had always done, as if nobody had left.
"""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def settings(smollm2: Path, output: Path, **changes: Any) -> Config:
    options: dict[str, Any] = {
        "sparsity": 0.2,
        "calibration": "builtin",
        "num_sequences": 8,
        "sequence_length": 128,
        "device": "cpu",
        "dtype": "float32",
        **({} if "recipe" in changes else {"form": "stock"}),
    }
    return Config.of(str(smollm2), str(output), **options | changes)


@pytest.fixture(scope="module")
def compressed(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    output = tmp_path_factory.mktemp("smollm2") / "compressed"
    return output, compress(settings(smollm2, output))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("story") / "story.txt"
    path.write_text(STORY)
    return path


def test_a_fifth_is_gone_and_the_report_says_so(compressed: tuple[Path, Report]) -> None:
    output, report = compressed
    stored = sum(tensor.numel() for tensor in tensors_of(output).values())
    assert report.stored_parameters == {"dense": 134_515_008, "compressed": stored}
    step = 30 * 3 * 576 * 64
    assert abs(stored - 0.8 * 134_515_008) <= step
    for layer in report.layers:
        (sublayer,) = layer.sublayers
        assert sublayer.predicted_error is not None
        assert 0 < sublayer.predicted_error < 1
        assert sublayer.measured_error == pytest.approx(sublayer.predicted_error, rel=0.3)


def test_the_converted_config_does_not_name_the_folder_of_the_gguf_file(
    smollm2: Path, compressed: tuple[Path, Report]
) -> None:
    for folder in (smollm2, compressed[0]):
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert "_model_name_or_path" not in config


def test_the_stock_class_generates_text(compressed: tuple[Path, Report]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, _ = compressed
    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(model).__name__ == "LlamaForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.chat_template
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(text.split()) >= 4


def test_it_beats_random_neurons_on_other_text(
    compressed: tuple[Path, Report], smollm2: Path, story: Path, tmp_path: Path
) -> None:
    windows = load_windows(str(story), load_tokenizer(smollm2), sequence_length=128, max_windows=None)
    folders = {"oneshot": compressed[0], "dense": smollm2, "random": tmp_path / "random"}
    compress(settings(smollm2, folders["random"], recipe="random"))
    scores = {
        name: perplexity(load_model(folder, device=CPU, dtype=torch.float32), windows)[0]
        for name, folder in folders.items()
    }
    sizes = {sum(tensor.numel() for tensor in tensors_of(folders[name]).values()) for name in ("oneshot", "random")}
    assert len(sizes) == 1
    assert scores["dense"] < 40
    # 1024 tokens of other prose: 1.7 times the dense perplexity was measured, and 71 times for random neurons
    assert scores["dense"] < scores["oneshot"] < 2.5 * scores["dense"]
    assert 10 * scores["oneshot"] < scores["random"]


def test_removing_nothing_gives_back_the_same_bits(short_smollm2: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    compress(settings(short_smollm2, output, sparsity=0.0))
    wanted, got = tensors_of(short_smollm2), tensors_of(output)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in wanted.items())


TASK = """
task: local_capitals
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {file}
validation_split: validation
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def test_both_forms_of_one_plan_give_the_same_model(short_smollm2: Path, tmp_path: Path) -> None:
    """Compare logits, and the answers in an lm-eval task, of one plan in two forms."""
    forms = ("stock", "per-layer")
    one_plan = {"recipe": "magnitude", "allocation": "uniform"}
    reports = [compress(settings(short_smollm2, tmp_path / form, form=form, **one_plan)) for form in forms]
    assert reports[0].stored_parameters == reports[1].stored_parameters
    ids = load_tokenizer(short_smollm2)(STORY, return_tensors="pt").input_ids
    with torch.inference_mode():
        stock, per_layer = (load_model(tmp_path / form, device=CPU, dtype=torch.float32)(ids).logits for form in forms)
    torch.testing.assert_close(per_layer, stock, rtol=0, atol=1e-5 * float(stock.abs().max()))
    answers = [run_capitals(tmp_path / form, tmp_path) for form in forms]
    assert answers[0] == answers[1]


def test_an_lm_eval_task_runs_from_local_data(compressed: tuple[Path, Report], tmp_path: Path) -> None:
    accuracy = run_capitals(compressed[0], tmp_path)["acc,none"]
    assert accuracy in (pytest.approx(0), pytest.approx(1 / 3), pytest.approx(2 / 3), pytest.approx(1))


def run_capitals(folder: Path, tmp_path: Path) -> dict[str, float]:
    """Run three documents of our own multiple-choice task."""
    capitals = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}
    names = sorted(capitals.values())
    rows = [
        {"question": f"What is the capital of {country}?", "choices": names, "gold": names.index(city)}
        for country, city in capitals.items()
    ]
    data = tmp_path / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "local_capitals.yaml").write_text(TASK.format(file=data))
    (result,) = evaluate(
        [str(folder)],
        [],
        decode_tokens=0,
        tasks=["local_capitals"],
        include_path=str(tmp_path),
        limit=3,
        device="cpu",
    )
    assert result.tasks is not None
    return result.tasks["local_capitals"]
