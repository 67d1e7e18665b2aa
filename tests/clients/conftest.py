"""Real engines: vLLM in an environment of its own, and llama.cpp's programs. `make clients` sets both up."""

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import CONTEXT, Answer
from servers import environment_of_others, serving

ROOT = Path(__file__).parents[2]
CLIENTS = Path(os.environ.get("ONESHOT_CLIENTS", ROOT / ".clients"))
VLLM_PYTHON, LLAMA_PROGRAMS = CLIENTS / "vllm" / "bin" / "python", CLIENTS / "llama.cpp" / "bin"
ASK_VLLM = Path(__file__).parent / "ask_vllm.py"
ATTEMPTS = 8  # at llama-perplexity, which may end before its log is printed (llama.cpp issue 22142)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)


def program(path: Path) -> Path:
    """Return a program of a client; the test fails without it."""
    if not path.exists():
        pytest.fail(f"{path} is not there; run make clients, or set ONESHOT_CLIENTS.")
    return path


def ask_vllm_together(requests: list[Answer], folder: Path) -> list[Any]:
    """Return what `ask_vllm.py` answers; its files are written into a folder."""
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(
        json.dumps([{"implementation": "auto", "dtype": "float32", "max_length": 512} | each for each in requests])
    )
    done = subprocess.run(
        [program(VLLM_PYTHON), ASK_VLLM, request, answer],
        env=environment_of_others(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    answers: list[Any] = json.loads(answer.read_text())
    return answers


@pytest.fixture
def ask_vllm(tmp_path: Path) -> Callable[..., list[Answer]]:
    """`ask_vllm(folder, prompts, max_tokens, implementation=…, dtype=…)` -> an answer for every prompt."""

    def ask(folder: Path, prompts: list[list[int]], max_tokens: int, **options: str) -> list[Answer]:
        request = {"folder": str(folder), "prompts": prompts, "max_tokens": max_tokens, **options}
        (answers,) = ask_vllm_together([request], tmp_path)
        assert not isinstance(answers, str), answers[-4000:]
        return list(answers)

    return ask


def llama_command(path: Path) -> list[str | Path]:
    """Return the command of llama-server for a file, with as little rounding as it can have."""
    options = ["-c", "2048", "-np", "1", "-t", "1", "-fa", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    return [program(LLAMA_PROGRAMS / "llama-server"), "-m", path, *options]


@contextmanager
def llama_server(path: Path) -> Iterator[Callable[[str, Answer], Answer]]:
    """Yield a function that posts JSON to a running llama-server and returns its answer."""
    with serving(llama_command(path), path.with_suffix(".log")) as address:

        def post(place: str, content: Answer) -> Answer:
            request = urllib.request.Request(
                f"{address}{place}", json.dumps(content).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as reply:
                answer: Answer = json.loads(reply.read())
                return answer

        yield post


@pytest.fixture
def ask_llama() -> Callable[..., list[Answer]]:
    """`ask_llama(path, prompts, max_tokens)` -> greedy continuations, with the log-probabilities of their tokens."""

    def ask(path: Path, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        answers = []
        with llama_server(path) as post:
            for prompt in prompts:
                settings = {"n_predict": max_tokens, "temperature": 0, "n_probs": 1, "return_tokens": True}
                answer = post("/completion", settings | {"prompt": prompt, "cache_prompt": False})
                scored = answer.get("completion_probabilities", [])
                scores = [token["logprob"] for token in scored]
                answers.append(
                    {"tokens": answer["tokens"], "scored": [token["id"] for token in scored], "scores": scores}
                )
        return answers

    return ask


@pytest.fixture
def llama_perplexity(tmp_path: Path) -> Callable[..., float]:
    """`llama_perplexity(path, text, chunks)` -> perplexity over the second halves of chunks of `CONTEXT` tokens."""

    def measure(path: Path, text: str, chunks: int) -> float:
        file = tmp_path / "text.txt"
        file.write_text(text)
        options = ["-c", str(CONTEXT), "--chunks", str(chunks), "-t", "1", "-fa", "off"]
        for _ in range(ATTEMPTS):
            done = subprocess.run(
                [program(LLAMA_PROGRAMS / "llama-perplexity"), "-m", path, "-f", file, *options],
                capture_output=True,
                text=True,
                check=True,
            )
            estimate = re.search(rf"\[{chunks}\]([\d.]+)", done.stdout)  # the last running mean
            if estimate is not None:
                return float(estimate[1])
        pytest.fail(f"llama-perplexity never printed its result: {done.stdout[-2000:]}")

    return measure


@pytest.fixture
def quantise() -> Callable[..., Path]:
    """`quantise(path, kind)` -> a GGUF file that llama-quantize wrote beside another."""

    def run(path: Path, kind: str) -> Path:
        quantised = path.with_name(f"{kind}.gguf")
        subprocess.run(
            [program(LLAMA_PROGRAMS / "llama-quantize"), path, quantised, kind], check=True, capture_output=True
        )
        return quantised

    return run
