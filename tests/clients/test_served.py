"""Results behind a server, judged by lm-eval over HTTP as by lm-eval's own `hf` model."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import VLLM_PYTHON, llama_command, program
from engines import run_oneshot
from servers import environment_of_others, serving

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Russia": "Moscow",
    "Poland": "Warsaw",
    "Hungary": "Budapest",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Turkey": "Ankara",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "China": "Beijing",
}
FOUR = ["Paris", "Rome", "Tokyo", "Cairo"]
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: "{data}"
  cache_dir: "{cache}"
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
{rest}
"""
CHOICES = """output_type: multiple_choice
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - metric: acc"""
WORDS = """output_type: generate_until
doc_to_target: city
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 16
  do_sample: false
metric_list:
  - metric: exact_match"""


@pytest.fixture(scope="module")
def results(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 at 20 % fewer parameters in three forms, from little text."""
    folder = tmp_path_factory.mktemp("served")
    text = ["--calibration", "builtin", "--num-sequences", "4", "--sequence-length", "128"]
    run_oneshot("profile", smollm2, "--output", folder / "profile", "--set", "curvature=none", *text)
    for form in ("stock", "nemotron-nas", "gguf"):
        profile = ["--profile", folder / "profile"] if form != "stock" else []
        run_oneshot(
            "compress", smollm2, "--output", folder / form, "--form", form, "--sparsity", "0.2", *profile, *text
        )
    return folder


@pytest.fixture
def task_files(tmp_path: Path) -> dict[str, Path]:
    """Two tasks over the same documents: `choices` asks for likelihoods, `words` for greedy text."""
    rows = []
    for country, city in CAPITALS.items():
        choices = [city, *(name for name in FOUR if name != city)][:4]
        rows.append({"country": country, "city": f" {city}", "choices": sorted(choices)})
        rows[-1]["gold"] = sorted(choices).index(city)
    data = tmp_path / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {}
    for name, rest in (("choices", CHOICES), ("words", WORDS)):
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(TASK.format(name=f"served_{name}", data=data, cache=tmp_path / "cache", rest=rest))
    return files


def judge(model: str, model_args: Sequence[str], task: Path, output: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return lm-eval's metrics and its model's answers, document by document."""
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", ",".join(model_args)]
    options = ["--tasks", task, "--output_path", output, "--log_samples", "--batch_size", "1"]
    done = subprocess.run(
        [*command, *options], env=environment_of_others(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (metrics,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    (found,) = json.loads(metrics.read_text())["results"].values()
    return {name: value for name, value in found.items() if isinstance(value, float)}, [row["resps"] for row in rows]


def likelihoods(answers: list[Any]) -> list[float]:
    """Return the log-likelihoods of all choices of all documents."""
    return [float(choice[0][0]) for answer in answers for choice in answer]


def with_hf(folder: Path, task: Path, output: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return what lm-eval's own model answers, in float32."""
    return judge("hf", [f"pretrained={folder}", "dtype=float32", "trust_remote_code=True"], task, output)


def over_http(address: str, folder: Path, task: Path, output: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return what a server answers, asked by lm-eval."""
    place = [f"base_url={address}/v1/completions", f"model={folder}", f"tokenizer={folder}", "trust_remote_code=True"]
    return judge("local-completions", [*place, "tokenizer_backend=huggingface", "max_length=512"], task, output)


@pytest.mark.parametrize("form", ["stock", "nemotron-nas"])
def test_vllm_has_the_likelihoods_of_hf(form: str, results: Path, task_files: dict[str, Path], tmp_path: Path) -> None:
    folder, task = results / form, task_files["choices"]
    metrics, answers = with_hf(folder, task, tmp_path / "hf")
    server = [program(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    options = ["--trust-remote-code", "--enforce-eager", "--dtype", "float32", "--max-model-len", "512"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with serving([*server, *options], tmp_path / "server.log", **settings) as address:
        metrics_served, answers_served = over_http(address, folder, task, tmp_path / "http")
    assert likelihoods(answers_served) == pytest.approx(likelihoods(answers), abs=2e-3)
    assert len(likelihoods(answers)) == 4 * len(CAPITALS)
    assert metrics_served == pytest.approx(metrics)


def test_llama_server_has_the_words_of_hf(results: Path, task_files: dict[str, Path], tmp_path: Path) -> None:
    """llama-server returns no log-probabilities of prompts, so only tasks that generate text can judge it."""
    folder, task = results / "nemotron-nas", task_files["words"]
    metrics, answers = with_hf(folder, task, tmp_path / "hf")
    with serving(llama_command(results / "gguf" / "model.gguf"), tmp_path / "server.log") as address:
        metrics_served, answers_served = over_http(address, folder, task, tmp_path / "http")
    assert answers_served == answers
    assert metrics_served == pytest.approx(metrics)
