"""Every form in the engines that open it: the same scores and the same greedy continuations as in transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import BY_LAYER, NEW_TOKENS, SIZES, Answer, Expected, half_chunk_perplexity, run_oneshot
from factories import MakeCheckpoint, MakeConfig, build_model, silence
from opened import BY_LAYER_CASES, EQUAL_LAYERS

from oneshot.architecture import RANKED_KINDS
from oneshot.pipeline import compress

CHUNKS = 8
LITTLE_TEXT = ["--calibration", "builtin", "--num-sequences", "8", "--sequence-length", "256"]
IDLE: dict[str, list[int]] = {"attention": [1], "ffn": [0, 3]}  # what `depth=sublayers` leaves out


def reduced_ranks(layers: list[dict[str, Any]]) -> set[str]:
    """Return which linears have low rank in any layer of a per-layer config."""
    return {f"{kind}_rank" for kind in RANKED_KINDS for layer in layers if layer[f"{kind}_rank"]}


class Case:
    """A random model, and how it is compressed."""

    def __init__(self, source: Path, write: Callable[..., Path], *, leaves_out_sublayers: bool) -> None:
        self.source, self.write, self.leaves_out_sublayers = source, write, leaves_out_sublayers

    def expected(self, form: str, **changes: Any) -> Expected:
        return Expected(self.write(form, **changes), self.source)


@pytest.fixture(params=BY_LAYER_CASES)
def case(
    request: pytest.FixtureRequest, save_model: Callable[..., Path], make_config: MakeConfig, tmp_path: Path
) -> Case:
    options, settings = BY_LAYER_CASES[request.param]
    leaves_out = settings.get("depth") == "sublayers"
    model = build_model(**SIZES, **options)
    if leaves_out:
        silence(model, **IDLE)
    source = save_model(model)

    def write(form: str, **changes: Any) -> Path:
        options = BY_LAYER | settings | changes
        report = compress(make_config(source, form=form, output=str(tmp_path / form), **options))
        if leaves_out:
            layers = report.plan["layers"]
            for kind, size in (("attention", "num_attention_heads"), ("ffn", "intermediate_size")):
                assert [number for number, layer in enumerate(layers) if not layer[size]] == IDLE[kind]
        return tmp_path / form

    return Case(source, write, leaves_out_sublayers=leaves_out)


def test_nemotron_nas_in_vllm(case: Case, ask_vllm: Callable[..., list[Answer]], tmp_path: Path) -> None:
    expected = case.expected("nemotron-nas")
    expected.agrees_with_vllm(ask_vllm(tmp_path / "nemotron-nas", expected.prompts, NEW_TOKENS))


def test_per_layer_in_vllms_transformers_backend(
    case: Case, ask_vllm: Callable[..., list[Answer]], tmp_path: Path
) -> None:
    if case.leaves_out_sublayers:
        pytest.skip("This backend needs attention in every layer (docs/engines.md).")
    expected = case.expected("per-layer")
    assert {"query_key_rank", "output_rank"} & reduced_ranks(expected.model.config.layers)
    answers = ask_vllm(tmp_path / "per-layer", expected.prompts, NEW_TOKENS, implementation="transformers")
    expected.agrees_with_vllm(answers)


def test_gguf_in_llama_cpp(
    case: Case, ask_llama: Callable[..., list[Answer]], llama_perplexity: Callable[..., float]
) -> None:
    expected = case.expected("per-layer", ranks="none")
    path = case.write("gguf") / "model.gguf"
    ours = half_chunk_perplexity(expected.model, expected.token_ids, CHUNKS)
    assert llama_perplexity(path, expected.text, CHUNKS) == pytest.approx(ours, rel=1e-3)
    assert expected.agrees_with_llama(ask_llama(path, expected.prompts, NEW_TOKENS))


def test_removed_heads_by_layer(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    ask_vllm: Callable[..., list[Answer]],
    ask_llama: Callable[..., list[Answer]],
) -> None:
    folder = make_checkpoint(**SIZES | {"heads": 8, "groups": 4, "head_dim": 32})
    heads: dict[str, Any] = {"heads": "id", "head_unit": "kv-group", "sparsity": 0.4}
    for form in ("per-layer", "gguf"):
        compress(make_config(folder, form=form, output=str(tmp_path / form), **BY_LAYER | heads))
    expected = Expected(tmp_path / "per-layer", folder)
    assert len({layer["num_attention_heads"] for layer in expected.model.config.layers}) > 1
    assert expected.agrees_with_llama(ask_llama(tmp_path / "gguf" / "model.gguf", expected.prompts, NEW_TOKENS))
    answers = ask_vllm(tmp_path / "per-layer", expected.prompts, NEW_TOKENS, implementation="transformers")
    expected.agrees_with_vllm(answers)


@pytest.mark.parametrize("options", EQUAL_LAYERS.values(), ids=EQUAL_LAYERS)
def test_equal_layers_of_other_families_in_llama_cpp(
    options: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    ask_llama: Callable[..., list[Answer]],
) -> None:
    folder = make_checkpoint(tied=True, **SIZES | options)
    for form in ("stock", "gguf"):
        compress(make_config(folder, form=form, allocation="uniform", embedding="none", output=str(tmp_path / form)))
    expected = Expected(tmp_path / "stock", folder)
    assert expected.agrees_with_llama(ask_llama(tmp_path / "gguf" / "model.gguf", expected.prompts, NEW_TOKENS))


def test_q8_0_has_the_bytes_of_llama_quantize(
    save_model: Callable[..., Path], make_config: MakeConfig, tmp_path: Path, quantise: Callable[..., Path]
) -> None:
    import gguf

    folder = save_model(build_model(**SIZES, attention_bias=True, dtype=torch.bfloat16))
    for dtype in ("q8_0", "keep"):
        compress(make_config(folder, form="gguf", save_dtype=dtype, output=str(tmp_path / dtype), **BY_LAYER))
    ours = gguf.GGUFReader(tmp_path / "q8_0" / "model.gguf")
    theirs = gguf.GGUFReader(quantise(tmp_path / "keep" / "model.gguf", "Q8_0"))
    by_name = {tensor.name: tensor for tensor in theirs.tensors}
    assert by_name.keys() == {tensor.name for tensor in ours.tensors}
    for tensor in ours.tensors:
        assert tensor.tensor_type == by_name[tensor.name].tensor_type
        assert tensor.data.tobytes() == by_name[tensor.name].data.tobytes()
    assert {tensor.tensor_type.name for tensor in ours.tensors} == {"F32", "F16", "Q8_0"}


@pytest.fixture(scope="module")
def smollm2_profile(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of SmolLM2 from little text: numbers of quality mean nothing here."""
    folder = tmp_path_factory.mktemp("smollm2") / "profile"
    run_oneshot("profile", smollm2, "--output", folder, "--set", "curvature=none", *LITTLE_TEXT)
    return folder


@pytest.mark.parametrize("sparsity", ["0.1", "0.2"])
def test_smollm2_in_every_engine(
    sparsity: str,
    smollm2: Path,
    smollm2_profile: Path,
    tmp_path: Path,
    ask_vllm: Callable[..., list[Answer]],
    ask_llama: Callable[..., list[Answer]],
    llama_perplexity: Callable[..., float],
    quantise: Callable[..., Path],
    record_property: Callable[[str, object], None],
) -> None:
    own = ["--sparsity", sparsity, "--profile", smollm2_profile]
    plan = [*own, "--set", "embedding=none"]
    whole = ["--set", "ranks=none"]
    for form in ("nemotron-nas", "per-layer", "gguf"):
        run_oneshot("compress", smollm2, "--output", tmp_path / form, "--form", form, *plan, *whole, *LITTLE_TEXT)
    run_oneshot("compress", smollm2, "--output", tmp_path / "ranks", "--form", "per-layer", *plan, *LITTLE_TEXT)
    expected = Expected(tmp_path / "nemotron-nas", smollm2)
    assert len({block["ffn"]["intermediate_size"] for block in expected.model.config.block_configs}) > 1
    answers = ask_vllm(tmp_path / "nemotron-nas", expected.prompts, NEW_TOKENS)
    record_property("vllm: perplexity of the prompts beside transformers'", expected.perplexities(answers))
    expected.agrees_with_vllm(answers)
    answers = ask_vllm(tmp_path / "per-layer", expected.prompts, NEW_TOKENS, implementation="transformers")
    expected.agrees_with_vllm(answers)
    ranked = Expected(tmp_path / "ranks", smollm2)
    assert {"query_key_rank", "output_rank"} <= reduced_ranks(ranked.model.config.layers)
    ranked.agrees_with_vllm(ask_vllm(tmp_path / "ranks", ranked.prompts, NEW_TOKENS, implementation="transformers"))
    run_oneshot("compress", smollm2, "--output", tmp_path / "default", "--form", "per-layer", *own, *LITTLE_TEXT)
    default = Expected(tmp_path / "default", smollm2)
    assert default.model.config.embedding
    assert reduced_ranks(default.model.config.layers)
    default.agrees_with_vllm(ask_vllm(tmp_path / "default", default.prompts, NEW_TOKENS, implementation="vllm"))
    path = tmp_path / "gguf" / "model.gguf"
    ours = half_chunk_perplexity(expected.model, expected.token_ids, CHUNKS)
    theirs = llama_perplexity(path, expected.text, CHUNKS)
    record_property("llama.cpp: perplexity beside transformers'", (theirs, ours))
    assert theirs == pytest.approx(ours, rel=1e-3)
    assert expected.agrees_with_llama(ask_llama(path, expected.prompts, NEW_TOKENS))
    assert llama_perplexity(quantise(path, "Q8_0"), expected.text, CHUNKS) == pytest.approx(ours, rel=0.05)
