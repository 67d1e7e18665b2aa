"""Results quantised by the tools that people use, opened again, and measured by transformers; W4A16 also in vLLM."""

import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import CLIENTS, ROOT, program
from engines import Answer
from factories import MakeCheckpoint, MakeResult, topics
from opened import QUANTISERS
from servers import environment_of_others

QUANTISERS_PYTHON = CLIENTS / "llm-compressor" / "bin" / "python"
SIZES: dict[str, Any] = {"hidden": 256, "width": 384, "heads": 8, "groups": 4, "layers": 3, "tied": True}
SIZES |= {"vocabulary": 1000}
LARGEST_RATIO = 1.1  # of perplexities: a random model's hardly move, and garbage's would
CASES = [(form, method) for methods, forms in QUANTISERS.values() for form in forms for method in methods]
CASES += [("gemma3_text", method) for method in ("gptq", "gptq-w8a8", "torchao-int8", "bitsandbytes-nf4")]
SMALLER = 0.85  # ÷ the bytes in bfloat16; the embedding stays whole
Write = Callable[[str], Path]


@pytest.fixture(scope="module")
def write(make_checkpoint: MakeCheckpoint, make_result: MakeResult) -> Write:
    """`write(form)` -> a result with sizes that groups of 64 divide; of another family with layers of its own."""

    def compressed(form: str) -> Path:
        if form not in ("stock", "nemotron-nas", "per-layer"):
            source, form = make_checkpoint(**SIZES, family=form, head_dim=32), "per-layer"
        else:
            source = make_checkpoint(**SIZES)
        options = {"sparsity": 0.4, "embedding": "auto"} if form == "per-layer" else {}
        return make_result(source, form=form, round_to=64, **options)

    return compressed


@pytest.fixture(scope="module")
def plain(write: Write, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`plain(form)` -> the bytes and the perplexity of a result that is not quantised."""
    return cache(lambda form: quantised("none", write(form), tmp_path_factory.mktemp("plain") / "out"))


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
def test_a_quantised_result_is_smaller_and_close(
    form: str, method: str, write: Write, plain: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    small, whole = quantised(method, write(form), tmp_path / "small"), plain(form)
    assert small["weight_bytes"] < SMALLER * whole["weight_bytes"]
    assert small["perplexity"] < LARGEST_RATIO * whole["perplexity"]
    assert small["whole_linears"] == 0


def test_the_per_layer_results_have_low_ranks_and_ranges(write: Write) -> None:
    own, other = (json.loads((write(form) / "config.json").read_text()) for form in ("per-layer", "gemma3_text"))
    for layers, ranges in ((own["layers"], own["embedding"]), (other["sizes"]["layers"], other["embedding_ranges"])):
        assert all(any(layer[kind] for layer in layers) for kind in ("query_key_rank", "output_rank", "up_rank"))
        assert min(part["rank"] for part in ranges) < 256


@pytest.mark.parametrize("form", ["stock", "nemotron-nas"])
def test_vllm_opens_four_bits(form: str, write: Write, ask_vllm: Callable[..., list[Answer]], tmp_path: Path) -> None:
    folder = write(form)
    quantised("gptq", folder, tmp_path / "small")
    prompts = [[5, 9, 40, 77, 30, 21, 8, 90], [100, 12, 33, 200, 7]]
    plain = ask_vllm(folder, prompts, 4, dtype="bfloat16")
    small = ask_vllm(tmp_path / "small", prompts, 4, dtype="bfloat16")
    for before, after in zip(plain, small, strict=True):
        assert after["scores"] == pytest.approx(before["scores"], abs=1.5)
