"""Results quantised by the tools that people use, opened again, and measured by transformers; W4A16 also in vLLM."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CLIENTS, ROOT, program
from engines import Answer
from factories import MakeCheckpoint, MakeConfig, topics
from opened import QUANTISERS
from servers import environment_of_others

from oneshot.pipeline import compress

QUANTISERS_PYTHON = CLIENTS / "llm-compressor" / "bin" / "python"
SIZES: dict[str, Any] = {"hidden": 128, "width": 384, "heads": 4, "groups": 2, "layers": 4, "tied": True}
LARGEST_RATIO = 1.1  # of perplexities: a random model's hardly move, and garbage's would
CASES = [(form, method) for methods, forms in QUANTISERS.values() for form in forms for method in methods]
SMALLER = 0.75  # ÷ the bytes in bfloat16; the embedding stays whole
Write = Callable[[str], Path]


@pytest.fixture
def write(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path) -> Write:
    """`write(form)` -> a result with sizes that groups of 64 divide."""

    def compressed(form: str) -> Path:
        options: dict[str, Any] = {"sparsity": 0.2, "round_to": 64, "output": str(tmp_path / form)}
        compress(make_config(make_checkpoint(**SIZES), form=form, **options))
        return tmp_path / form

    return compressed


def quantised(method: str, folder: Path, output: Path) -> dict[str, Any]:
    """Return the bytes and the perplexity of a quantised folder, in the tools' own environment."""
    text = output.with_suffix(".txt")
    text.write_text(topics(20, 30))
    worker = [program(QUANTISERS_PYTHON), ROOT / "benchmarks" / "quantise_with.py", method, folder, output]
    texts = ["--calibration", text, "--judged-on", text, "--num-sequences", "16", "--sequence-length", "64"]
    done = subprocess.run(
        [*worker, *texts, "--windows", "4", "--window-length", "128"],
        env=environment_of_others(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


@pytest.mark.parametrize(("form", "method"), CASES)
def test_a_quantised_result_is_smaller_and_close(form: str, method: str, write: Write, tmp_path: Path) -> None:
    folder = write(form)
    plain = quantised("none", folder, tmp_path / "plain")
    small = quantised(method, folder, tmp_path / "small")
    assert small["weight_bytes"] < SMALLER * plain["weight_bytes"] or method == "torchao-int4"
    assert small["perplexity"] < LARGEST_RATIO * plain["perplexity"]


@pytest.mark.parametrize("form", ["stock", "nemotron-nas"])
def test_vllm_opens_four_bits(form: str, write: Write, ask_vllm: Callable[..., list[Answer]], tmp_path: Path) -> None:
    folder = write(form)
    quantised("gptq", folder, tmp_path / "small")
    prompts = [[5, 9, 40, 77, 30, 21, 8, 90], [100, 12, 33, 200, 7]]
    plain = ask_vllm(folder, prompts, 4, dtype="bfloat16")
    small = ask_vllm(tmp_path / "small", prompts, 4, dtype="bfloat16")
    for before, after in zip(plain, small, strict=True):
        assert after["scores"] == pytest.approx(before["scores"], abs=1.5)
