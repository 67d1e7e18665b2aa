"""Per-layer results of families whose layers are not Llama's, in vLLM's Transformers backend and by the plugin."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ask_vllm_together
from engines import BY_LAYER, NEW_TOKENS, SHARED_LAYERS, SHARED_TENSORS, SIZES, Expected
from factories import alternate_, build_model
from families.cases import variants
from opened import FEWER_HEADS, MIXTURES_BY_LAYER, NO_RANKS, OWN_NUMBERS, RESIZED_CASES, SHARED_EXPERTS
from safetensors.torch import load_file, save_file

from oneshot import Config
from oneshot.pipeline import compress

Answered = tuple[Expected, Any]
HYBRID = "a hybrid"
TWO_PROCESSES, EXPERT_PARALLEL = "tensors of experts are shared", "whole experts are shared"
RANKED, OLDER, STAGGERED = "gemma3_text", "names-of-older-tensors", "staggered"
RANKED_EMBEDDINGS = {"gemma3_text, ranks of the embedding": True, "gemma3_text, ranks of two tables": False}  # tied
PROCESSES = {f"{name}, shared tensors": (name, SHARED_TENSORS) for name in (RANKED, "phi", "qwen2_moe")}
PROCESSES |= {f"{name}, shared layers": (name, SHARED_LAYERS) for name in (*RANKED_EMBEDDINGS, "qwen2_moe")}
PROCESSES[TWO_PROCESSES] = SHARED_EXPERTS, SHARED_TENSORS
CASES = RESIZED_CASES | {HYBRID: ("falcon_h1", {"ranks": "none", "embedding": "none"})}


# the linear of low rank in the modelling file of older results: a linear itself, whose tensors it names
OLDER_CLASS = """

class OneshotLowRankLinear(nn.Linear):
    def __init__(self, read, outputs, bias):
        super().__init__(read.sizes[0], outputs, bias)
        self._read = (read,)

    def forward(self, x):
        return super().forward(self._read[0](x))
"""


def older_result(result: Path, folder: Path) -> Path:
    """Write a result as it was before linears of low rank had a plain linear inside."""
    shutil.copytree(result, folder)
    modelling = folder / "modeling_oneshot_resized.py"
    modelling.write_text(modelling.read_text() + OLDER_CLASS)
    (weights,) = folder.glob("*.safetensors")
    now = load_file(weights)
    then = {name.replace(".linear.", "."): tensor for name, tensor in now.items()}
    assert then.keys() != now.keys()
    save_file(then, weights, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def answered(
    make_checkpoint: Callable[..., Path],
    save_model: Callable[..., Path],
    text_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Answered]:
    """All cases in one process of vLLM, whose start takes longer than all answers."""
    folder, expected, requests = tmp_path_factory.mktemp("results"), {}, {}
    text = {"calibration": str(text_file), "num_sequences": 16, "sequence_length": 32}
    cases = {name: (variants()[variant], settings) for name, (variant, settings) in CASES.items()} | MIXTURES_BY_LAYER
    for name, (options, settings) in cases.items():
        large_enough = {"head_dim": 32} if "head_dim" in options else {}  # for vLLM on a CPU
        if name in RANKED_EMBEDDINGS:
            larger = {"tied": RANKED_EMBEDDINGS[name], "vocabulary": 4000}
            source = save_model(alternate_(build_model(**SIZES | options | large_enough | larger)))
        else:
            source = make_checkpoint(**SIZES | options | large_enough)
        output = folder / name.replace(" ", "-")
        compress(Config.of(str(source), str(output), form="per-layer", device="cpu", **text | BY_LAYER | settings))
        expected[name] = Expected(output, source)
        requests[name] = {
            "folder": str(output),
            "prompts": expected[name].prompts,
            "max_tokens": NEW_TOKENS,
            "implementation": "transformers" if name in (NO_RANKS, HYBRID) else "auto",
        }
    shared = PROCESSES | {EXPERT_PARALLEL: (SHARED_EXPERTS, {"enable_expert_parallel": True})}
    requests |= {how: requests[name] | {"options": options} for how, (name, options) in shared.items()}
    expected |= {how: expected[name] for how, (name, _) in shared.items()}
    older = older_result(folder / RANKED, folder / OLDER)
    requests[OLDER], expected[OLDER] = requests[RANKED] | {"folder": str(older)}, expected[RANKED]
    prompts, limits = expected[RANKED].staggered()
    requests[STAGGERED] = requests[RANKED] | {"prompts": prompts, "max_tokens": limits}
    expected[STAGGERED] = expected[RANKED]
    answers = ask_vllm_together([*requests.values()], folder)
    return {name: (expected[name], answer) for name, answer in zip(requests, answers, strict=True)}


@pytest.mark.parametrize("name", [name for name in RESIZED_CASES | MIXTURES_BY_LAYER if name != FEWER_HEADS])
def test_it_answers_as_transformers(name: str, answered: dict[str, Answered]) -> None:
    expected, answers = answered[name]
    assert not isinstance(answers, str), answers[-4000:]
    if name in RANKED_EMBEDDINGS:
        assert (expected.model.config.output_head_ranges is None) == RANKED_EMBEDDINGS[name]
    if name in OWN_NUMBERS:
        layers = expected.model.config.sizes["layers"]
        assert len({layer["experts"]["count"] for layer in layers if layer["experts"]}) > 1
    expected.agrees_with_vllm(answers)


def test_older_results_answer_as_transformers(answered: dict[str, Answered]) -> None:
    expected, answers = answered[OLDER]
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_with_vllm(answers)


def test_prompts_that_come_and_end_in_turns_have_their_answers(answered: dict[str, Answered]) -> None:
    """Continuous batching: four places for ten prompts, so a prompt is read while others write."""
    expected, answers = answered[STAGGERED]
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_when_staggered(answers)


@pytest.mark.parametrize("name", PROCESSES)
def test_two_processes_answer_as_transformers(name: str, answered: dict[str, Answered]) -> None:
    expected, answers = answered[name]
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_with_vllm(answers)


def test_heads_of_their_own_are_refused(answered: dict[str, Answered]) -> None:
    _, error = answered[FEWER_HEADS]
    assert "heads where the config has 4" in error
    assert "compress with --set heads=none" in error


def test_expert_parallelism_is_refused_for_own_numbers_of_experts(answered: dict[str, Answered]) -> None:
    _, error = answered[EXPERT_PARALLEL]
    assert "experts, which vLLM's expert parallelism cannot hold" in error
    assert "compress with --set expert_counts=equal" in error


def test_hybrids_are_refused(answered: dict[str, Answered]) -> None:
    """vLLM's backend would open this one without the states of its state-space models, and answer wrongly."""
    _, error = answered[HYBRID]
    assert "whose states vLLM's Transformers backend does not keep" in error
    assert "compress with --form stock" in error
