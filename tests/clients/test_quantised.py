"""Results quantised by the tools that people use, opened again, and measured by transformers; W4A16 also in vLLM."""

import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import CLIENTS, ROOT, ask_vllm_together, program
from engines import Answer
from factories import MakeCheckpoint, MakeResult, topics
from opened import QUANTISERS
from servers import environment_of_others

QUANTISERS_PYTHON = CLIENTS / "llm-compressor" / "bin" / "python"
SIZES: dict[str, Any] = {"hidden": 256, "width": 384, "heads": 8, "groups": 4, "layers": 3, "tied": True}
SIZES |= {"vocabulary": 1000}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # other models in the per-layer form
    "gemma3_text": ({"family": "gemma3_text", "head_dim": 32}, {"sparsity": 0.4, "embedding": "auto"}),
    "subspaces": ({}, {"recipe": "group-pca", "group_size": 1, "hidden_size": 192}),
    "opt": ({"family": "opt", "groups": 8}, {"sparsity": 0.2}),
}
LARGEST_RATIO = 1.1  # of perplexities: a random model's hardly move, and garbage's would
CASES = [(form, method) for methods, forms in QUANTISERS.values() for form in forms for method in methods]
CASES += [("gemma3_text", method) for method in ("gptq", "gptq-w8a8", "torchao-int8", "bitsandbytes-nf4")]
SMALLER = 0.85  # ÷ the bytes in bfloat16; the embedding stays whole
Write = Callable[[str], Path]
Tried = Callable[[str, str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def write(make_checkpoint: MakeCheckpoint, make_result: MakeResult) -> Write:
    """`write(form)` -> a result with sizes that groups of 64 divide; of another family with layers of its own."""

    def compressed(form: str) -> Path:
        model, options = OTHERS.get(form, ({}, {"sparsity": 0.4, "embedding": "auto"} if form == "per-layer" else {}))
        form = "per-layer" if form in OTHERS else form
        return make_result(make_checkpoint(**SIZES | model), form=form, round_to=64, **options)

    return compressed


@pytest.fixture(scope="module")
def tried(write: Write, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """`tried(form, method)` -> the folder of a quantised result, its bytes and its perplexity."""

    @cache
    def of(form: str, method: str) -> tuple[Path, dict[str, Any]]:
        output = tmp_path_factory.mktemp("quantised") / method
        return output, quantised(method, write(form), output)

    return of


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
def test_a_quantised_result_is_smaller_and_close(form: str, method: str, tried: Tried) -> None:
    (_, small), (_, whole) = tried(form, method), tried(form, "none")
    assert small["weight_bytes"] < SMALLER * whole["weight_bytes"]
    assert small["perplexity"] < LARGEST_RATIO * whole["perplexity"]
    assert small["whole_linears"] == 0


def test_the_per_layer_results_have_low_ranks_and_ranges(write: Write) -> None:
    own, other = (json.loads((write(form) / "config.json").read_text()) for form in ("per-layer", "gemma3_text"))
    for layers, ranges in ((own["layers"], own["embedding"]), (other["sizes"]["layers"], other["embedding_ranges"])):
        assert all(any(layer[kind] for layer in layers) for kind in ("query_key_rank", "output_rank", "up_rank"))
        assert min(part["rank"] for part in ranges) < 256


PROMPTS = [[5, 9, 40, 77, 30, 21, 8, 90], [100, 12, 33, 200, 7]]


@pytest.mark.parametrize("form", ["stock", "nemotron-nas"])
def test_vllm_opens_four_bits(form: str, write: Write, tried: Tried, ask_vllm: Callable[..., list[Answer]]) -> None:
    plain = ask_vllm(write(form), PROMPTS, 4, dtype="bfloat16")
    small = ask_vllm(tried(form, "gptq")[0], PROMPTS, 4, dtype="bfloat16")
    for before, after in zip(plain, small, strict=True):
        assert after["scores"] == pytest.approx(before["scores"], abs=1.5)


# largest difference of a log-probability; rounded inputs have steps of 1/127.5 of the largest number in transformers,
# and of 1/127 in vLLM
IN_VLLM = {
    ("per-layer", "gptq"): 0.05,
    ("per-layer", "awq"): 0.05,
    ("per-layer", "gptq-w8a8"): 0.25,
    ("per-layer", "smoothquant"): 0.25,
    ("per-layer", "fp8"): 0.6,
    ("subspaces", "gptq-w8a8"): 0.25,
    ("opt", "gptq-w8a8"): 0.25,
}


def test_the_plugin_answers_as_transformers(tried: Tried, tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [
        {"folder": str(tried(*case)[0]), "dtype": "bfloat16", "prompts": PROMPTS, "max_tokens": 4} for case in IN_VLLM
    ]
    ours = ask_vllm_together(requests, tmp_path)
    worker = Path(__file__).parent / "ask_transformers.py"
    command = [program(QUANTISERS_PYTHON), worker, tmp_path / "request.json", tmp_path / "expected.json"]
    subprocess.run(command, env=environment_of_others(), check=True, capture_output=True)
    expected = json.loads((tmp_path / "expected.json").read_text())
    for (case, largest), answers, known in zip(IN_VLLM.items(), ours, expected, strict=True):
        assert not isinstance(answers, str), (case, answers[-2000:])
        for theirs, own in zip(answers, known, strict=True):
            assert theirs["scores"] == pytest.approx(own["scores"], abs=largest), case


OWN = {
    ("stock", "w4a16"): 0.05,
    ("per-layer", "w4a16"): 0.05,
    ("per-layer", "w8a8"): 0.25,
    ("nemotron-nas", "w8a8"): 0.25,
}


def test_vllm_opens_what_a_run_has_quantised(
    make_checkpoint: MakeCheckpoint, make_result: MakeResult, tmp_path: Path
) -> None:
    """Results of `--quantise` answer as in transformers."""
    pytest.importorskip("compressed_tensors", reason="the extra `compressed`")
    import torch
    from transformers import AutoModelForCausalLM

    folders = [make_result(make_checkpoint(**SIZES), form=form, quantise=name, sparsity=0.4) for form, name in OWN]
    requests = [{"folder": str(one), "dtype": "bfloat16", "prompts": PROMPTS, "max_tokens": 4} for one in folders]
    for folder, answers, (case, largest) in zip(
        folders, ask_vllm_together(requests, tmp_path), OWN.items(), strict=True
    ):
        assert not isinstance(answers, str), (case, answers[-2000:])
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
        for prompt, theirs in zip(PROMPTS, answers, strict=True):
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                scores = model(ids, use_cache=False).logits.float().log_softmax(-1)[0, :-1]
            known = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
            assert theirs["scores"] == pytest.approx(known, abs=largest), case
