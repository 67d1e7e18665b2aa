"""The plugin `oneshot-vllm`: per-layer results by vLLM's own layers, beside transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import adapter_of_another, write_adapter
from conftest import ask_vllm_together
from engines import BY_LAYER, NEW_TOKENS, SHARED_LAYERS, SHARED_TENSORS, SIZES, Expected
from factories import alternate_, build_model, silence
from opened import PLUGIN_CASES

from oneshot import Config
from oneshot.pipeline import compress

FIRST, STAGGERED = "no attention first", "ranks, biases"
# what `depth=sublayers` leaves out
IDLE: dict[str, dict[str, list[int]]] = {
    "sublayers left out": {"attention": [1], "ffn": [0, 3]},
    FIRST: {"attention": [0, 2], "ffn": [3]},
}

ONE_KV_HEAD = "one KV head, ranks"
EMBEDDINGS = "ranks of the embedding", "ranks of two tables"
TENSORS = ("ranks, biases", *EMBEDDINGS, "sizes inside heads", ONE_KV_HEAD)  # also by two processes
LAYERS = ("ranks, biases", *EMBEDDINGS, "subspaces", "opt")
PROCESSES = {f"{name}, shared tensors": (name, SHARED_TENSORS) for name in TENSORS}
PROCESSES["ranks, biases, shared by four"] = "ranks, biases", SHARED_TENSORS | {"tensor_parallel_size": 4}
OF_ANOTHER = "the dense model's adapter"
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {  # of a result, and options of vLLM beside
    "ranks, adapter": ("ranks, biases", {}),
    "no ranks, adapter": ("no ranks, rotary of llama3", {}),
    "adapter, shared tensors": ("ranks, biases", SHARED_TENSORS),
    "one KV head, adapter, shared tensors": (ONE_KV_HEAD, SHARED_TENSORS),
}
PROCESSES |= {f"{name}, shared layers": (name, SHARED_LAYERS) for name in LAYERS}
Answered = tuple[Expected, Any]  # transformers' answers, and vLLM's or an error's text


@pytest.fixture(scope="module")
def answered(
    save_model: Callable[..., Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answered]:
    """All cases in one process of vLLM, whose start takes longer than all answers."""
    folder, expected, requests = tmp_path_factory.mktemp("results"), {}, {}
    text = {"calibration": str(text_file), "num_sequences": 16, "sequence_length": 32}
    for name, (options, settings, _) in PLUGIN_CASES.items():
        model = build_model(**SIZES | options)
        silence(model, **IDLE.get(name, {}))
        if settings.get("embedding") == "auto":
            alternate_(model)
        source, output = save_model(model), folder / name.replace(" ", "-")
        compress(Config.of(str(source), str(output), form="per-layer", device="cpu", **text | BY_LAYER | settings))
        expected[name] = Expected(output, source)
        request = {"folder": str(output), "prompts": expected[name].prompts, "max_tokens": NEW_TOKENS}
        requests[name] = request | {"implementation": "vllm"}
    shared = {how: requests[name] | {"options": options} for how, (name, options) in PROCESSES.items()}
    expected |= {how: expected[name] for how, (name, _) in PROCESSES.items()}
    sources: dict[str, Path] = {}
    for case, (name, options) in ADAPTERS.items():
        whole, place = Path(requests[name]["folder"]), folder / case.replace(" ", "-")
        if name not in sources:
            sources[name] = place
            write_adapter(whole, place, place.with_suffix(".merged"))
        merged = Expected(sources[name].with_suffix(".merged"), expected[name].source)
        expected[case] = merged
        options = options | {"enable_lora": True, "max_lora_rank": 8}
        adapter = {"adapter": str(sources[name]), "options": options, "prompts": merged.prompts}
        requests[case] = requests[name] | adapter
    of_another = folder / "of-another"
    adapter_of_another(sources[STAGGERED], of_another)
    expected[OF_ANOTHER] = expected[STAGGERED]
    requests[OF_ANOTHER] = requests["ranks, adapter"] | {"adapter": str(of_another)}
    prompts, limits = expected[STAGGERED].staggered()
    staggered = {"staggered": requests[STAGGERED] | {"prompts": prompts, "max_tokens": limits}}
    expected["staggered"] = expected[STAGGERED]
    requests |= shared | staggered
    answers = ask_vllm_together([*requests.values()], folder)
    return {name: (expected[name], answer) for name, answer in zip(requests, answers, strict=True)}


@pytest.mark.parametrize("name", PLUGIN_CASES)
def test_it_answers_as_transformers(name: str, answered: dict[str, Answered]) -> None:
    (_, settings, is_there), (expected, answers) = PLUGIN_CASES[name], answered[name]
    config = expected.model.config
    assert any(is_there(layer) for layer in config.layers)
    if name in IDLE:
        assert [number for number, layer in enumerate(config.layers) if not layer["num_attention_heads"]] == IDLE[name][
            "attention"
        ]
    assert bool(config.embedding) == (settings.get("embedding") == "auto")
    assert bool(config.output_head) == (name == EMBEDDINGS[1])
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_with_vllm(answers)


@pytest.mark.parametrize("name", PROCESSES)
def test_two_processes_answer_as_transformers(name: str, answered: dict[str, Answered]) -> None:
    expected, answers = answered[name]
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_with_vllm(answers)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_answers_as_the_weights_with_it(name: str, answered: dict[str, Answered]) -> None:
    expected, answers = answered[name]
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_with_vllm(answers)


def test_an_adapter_of_other_sizes_is_refused(answered: dict[str, Answered]) -> None:
    """vLLM would take the first rows of it."""
    _, error = answered[OF_ANOTHER]
    assert "outputs for" in error
    assert "train an adapter on the result itself" in error


def test_prompts_that_come_and_end_in_turns_have_their_answers(answered: dict[str, Answered]) -> None:
    """Continuous batching: four places for ten prompts, so a prompt is read while others write."""
    expected, answers = answered["staggered"]
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_when_staggered(answers)
