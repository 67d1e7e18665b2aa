"""GGUF files of families beside Llama's, as llama.cpp's converter writes them, are the models that they came from.

The metadata are those that `convert_hf_to_gguf.py` (of llama-cpp-python 0.3.36) wrote for these tiny models.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeConfig, build_model
from families.cases import CASES
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import bytes_to_unicode

from oneshot.checkpoint import locate_checkpoint, open_gguf
from oneshot.checkpoint.gguf_tokenizer import cutting, with_the_files_tokens
from oneshot.checkpoint.stock import stock_classes, stock_config
from oneshot.errors import CheckpointError
from oneshot.pipeline import predict
from oneshot.text import load_tokenizer

TOKEN_IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(1))
SIZES = {
    "context_length": 512,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
RMS = {"attention.layer_norm_rms_epsilon": 1e-6}
RMS5 = {"attention.layer_norm_rms_epsilon": 1e-5}
CENTRED = {"attention.layer_norm_epsilon": 1e-5}
HEADS = {"attention.key_length": 8, "attention.value_length": 8}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LOCAL = {"block_count": 7, "attention.sliding_window": 7, "rope.freq_base": 900.0, "rope.freq_base_swa": 50.0}
PHI = {**RMS5, "rope.scaling.original_context_length": 4096, "rope.dimension_count": 8, "rope.freq_base": 1e4}
NEMOTRON = {"rope.freq_base": 1e4, "vocab_size": 400, "rope.dimension_count": 4, "rope.scaling.type": "none"}
NEMOTRON |= {**RMS5, **HEADS, **CENTRED}
STABLELM = {**CENTRED, "rope.dimension_count": 2, "use_parallel_residual": False}
ROTARY8 = {"vocab_size": 400, "rope.freq_base": 1e4, "rope.dimension_count": 8}
WINDOWS = {
    "block_count": 5,
    "attention.sliding_window": 7,
    "attention.sliding_window_pattern": [True, True, True, False, True],
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_attn_factor": 1.1386294361119891,  # 0.1 ln 4 + 1, as the converter writes OLMo 3's own
}
GLM = 1.56249996052793e-07  # the default of transformers
WITHOUT_KV_HEADS = {name: value for name, value in SIZES.items() if name != "attention.head_count_kv"}
# the family's architecture and what its converter writes; `SIZES` are in all of them
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {**RMS, **HEADS}),
    "gemma2": ("gemma2", {**RMS, **HEADS, **CAPS, "attention.sliding_window": 7}),
    "gemma3": ("gemma3", {**RMS, **HEADS, **LOCAL}),
    "gemma3-scaled": ("gemma3", {**RMS, **HEADS, **LOCAL, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "gemma3-without-windows": ("gemma3", {**RMS, **HEADS, "rope.freq_base": 900.0}),
    "phi3": ("phi3", {**PHI, "attention.sliding_window": 0}),
    "phi3-window": ("phi3", {**PHI, "attention.sliding_window": 7}),
    "phi3-long": (
        "phi3",
        {**PHI, "rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.133893370628357},
    ),
    "phi3-partly": ("phi3", {**PHI, "rope.dimension_count": 6}),
    "nemotron": ("nemotron", NEMOTRON),
    "nemotron-biases": ("nemotron", NEMOTRON),
    "starcoder2": ("starcoder2", {**CENTRED, "rope.freq_base": 1e4}),
    "stablelm": ("stablelm", STABLELM),
    "stablelm-biases": ("stablelm", STABLELM),
    "falcon": (
        "falcon",
        {**CENTRED, "tensor_data_layout": "jploski", "feed_forward_length": 128, "attention.head_count_kv": 1},
    ),
    "granite": (
        "granite",
        {**RMS, **ROTARY8, "attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 5.0},
    ),
    "olmo2": ("olmo2", {**RMS5, "rope.freq_base": 1e4}),
    "olmo3": ("olmo2", {**RMS5, **WINDOWS, "rope.freq_base": 5e5, "rope.freq_base_swa": 5e5}),
    "olmo3-yarn": ("olmo2", {**RMS5, **WINDOWS, **YARN, "rope.freq_base": 5e5}),
    "olmo3-scaled": (
        "olmo2",
        {**RMS5, **WINDOWS, "rope.freq_base": 5e5, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "gemma3-yarn": ("gemma3", {**RMS, **HEADS, **LOCAL, **YARN}),
    "exaone4": ("exaone4", {**RMS5, **WINDOWS, "rope.freq_base": 1e4, "vocab_size": 400}),
    "smollm3": ("smollm3", {**RMS, "block_count": 4, "rope.freq_base": 2e6, "rope.dimension_count": 8}),
    "arcee": ("arcee", {**RMS5, **HEADS, **ROTARY8}),
    "cohere": ("command-r", {**CENTRED, "rope.freq_base": 5e5, "logit_scale": 0.5, "rope.scaling.type": "none"}),
    "seed_oss-biases": ("seed_oss", {**RMS, **HEADS, "rope.freq_base": 1e4}),
    "ernie4_5": ("ernie4_5", {**RMS5, **HEADS, "rope.freq_base": 5e5}),
    "hunyuan_v1_dense": ("hunyuan-dense", {**RMS5, **HEADS, "rope.freq_base": 1e4}),
    "glm4": ("glm4", {**HEADS, "attention.layer_norm_rms_epsilon": GLM, "rope.dimension_count": 4}),
    "phi": ("phi2", {**CENTRED, "feed_forward_length": 128, "attention.head_count_kv": 4, "rope.dimension_count": 4}),
    "gpt2": ("gpt2", {**CENTRED, "feed_forward_length": 128}),
    "gpt2-untied": ("gpt2", {**CENTRED, "feed_forward_length": 128}),
}
GEMMA3 = CASES["gemma3_text"].options
GLOBAL, ROTARY = "full_attention", "rope_parameters"
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
SCALED = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
EQUAL = ("gemma", "phi3", "nemotron", "starcoder2", "stablelm", "granite", "olmo2", "olmo3", "exaone4", "smollm3")
EQUAL += ("arcee", "cohere", "ernie4_5", "hunyuan_v1_dense", "glm4")
LONG, SHORT = [1.0, 1.5, 2.0, 4.0], [1.0, 1.01, 1.02, 1.03]
MODELS: dict[str, dict[str, Any]] = {
    **{name: CASES[name].options for name in EQUAL},
    "gemma2": {**CASES["gemma2"].options, "query_pre_attn_scalar": 8},
    "gemma3": {**GEMMA3, "layers": 7, "layer_types": None, "query_pre_attn_scalar": 8},
    "gemma3-scaled": {
        **GEMMA3,
        "layers": 7,
        "layer_types": None,
        "query_pre_attn_scalar": 8,
        ROTARY: GEMMA3[ROTARY] | {GLOBAL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0}},
    },
    "gemma3-yarn": {
        **GEMMA3,
        "layers": 7,
        "layer_types": None,
        "query_pre_attn_scalar": 8,
        ROTARY: GEMMA3[ROTARY] | {GLOBAL: SCALED | {"rope_theta": 900.0}},
    },
    "olmo3-yarn": {**CASES["olmo3"].options, ROTARY: {GLOBAL: SCALED, "sliding_attention": PLAIN}},
    "olmo3-scaled": {
        **CASES["olmo3"].options,
        ROTARY: {GLOBAL: PLAIN | {"rope_type": "linear", "factor": 4.0}, "sliding_attention": PLAIN},
    },
    "gemma3-without-windows": {**GEMMA3, "layers": 2, "layer_types": [GLOBAL] * 2, "query_pre_attn_scalar": 8},
    "phi3-window": {"family": "phi3", "sliding_window": 7},
    "phi3-long": {
        "family": "phi3",
        "original_max_position_embeddings": 128,
        ROTARY: {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": LONG, "short_factor": SHORT},
    },
    "phi3-partly": {
        "family": "phi3",
        ROTARY: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "nemotron-biases": {"family": "nemotron", "attention_bias": True, "mlp_bias": True},
    "stablelm-biases": {"family": "stablelm", "use_qkv_bias": True},
    "falcon": {**CASES["falcon"].options, "width": 128},
    "seed_oss-biases": CASES["seed_oss"].options | CASES["seed_oss"].variants["biases"],
    "phi": {"family": "phi", "width": 128, "groups": 4},
    "gpt2": {**CASES["gpt2"].options, "width": 128},
    "gpt2-untied": {"family": "gpt2", "width": 128},
}
MODELS["phi3-long"][ROTARY]["original_max_position_embeddings"] = 128
PAIRS = ("granite", "smollm3", "arcee")  # rows that positions turn together lie side by side
OFFSET = ("gemma", "gemma2", "gemma3", "nemotron")  # norms are stored with one added
CONTROL = 3  # the type of tokens such as <bos>
Write = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Write:
    """`write_gguf(name, model, further metadata=…)` -> the file that the converter makes of a model."""

    def write(name: str, model: Any, **further: Any) -> Path:
        import gguf

        architecture, metadata = FILES[name]
        sizes = WITHOUT_KV_HEADS if architecture == "gpt2" else SIZES
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", architecture)
        for key, value in (sizes | metadata | further).items():
            if isinstance(value, list):
                writer.add_array(f"{architecture}.{key}", value)
                continue
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](f"{architecture}.{key}", value)
        add_vocabulary(writer)
        kind = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
        places = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
        tied = set(model._tied_weights_keys) if model.config.tie_word_embeddings else set()
        for own, tensor in model.state_dict().items():
            if own in tied:
                continue
            values = tensor.numpy()
            if architecture == "gpt2" and own.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
                values = np.ascontiguousarray(values.T)
            if architecture in PAIRS and own.endswith(("q_proj.weight", "k_proj.weight")):
                size = FILES[name][1].get("attention.key_length", 8)
                halves = values.reshape(len(values) // size, 2, size // 2, -1)
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
            if architecture in OFFSET and own.endswith("norm.weight"):
                values = values + 1
            writer.add_tensor(places.get_name(own, try_suffixes=(".weight", ".bias")), values)
        for own, values in (("long", LONG), ("short", SHORT)):
            if name == "phi3-long":
                writer.add_tensor(f"rope_factors_{own}.weight", np.array(values, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / f"{name}.gguf"

    return write


def add_vocabulary(writer: Any) -> None:
    """Add a vocabulary as Gemma's files have it: sentencepiece without merges, and a mark at the start of texts."""
    letters = ["▁", *map(chr, range(ord("a"), ord("z") + 1)), *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *letters]
    tokens += [f"<unused{number}>" for number in range(400 - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([CONTROL] * 4 + [1] * (len(tokens) - 4))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0]['content'] }}")


@pytest.mark.parametrize("name", FILES)
@torch.inference_mode()
def test_a_file_is_the_model_it_came_from(name: str, write_gguf: Write) -> None:
    """Weights are equal, but for the rounding of norms to which one was added; so are the logits of the stock class."""
    model = build_model(**MODELS[name])
    source = open_gguf(str(write_gguf(name, model)))
    assert source is not None
    weights, wanted = source.read(source.shapes), model.state_dict()
    assert weights.keys() <= wanted.keys()
    for own, tensor in weights.items():
        assert source.shapes[own] == tuple(tensor.shape)
        torch.testing.assert_close(tensor, wanted[own], rtol=0, atol=2e-7)
    _, model_class = stock_classes(source.config)
    found = model_class.from_pretrained(None, config=stock_config(source.config), state_dict=weights)
    assert type(found) is type(model)
    torch.testing.assert_close(found(TOKEN_IDS).logits, model(TOKEN_IDS).logits, rtol=1e-5, atol=1e-5)
    loaded = source.load(device=torch.device("cpu"), dtype=torch.float32)
    assert (type(loaded), loaded.config.to_diff_dict()) == (type(found), found.config.to_diff_dict())
    torch.testing.assert_close(loaded(TOKEN_IDS).logits, found(TOKEN_IDS).logits, rtol=0, atol=0)
    assert loaded.num_parameters() == found.num_parameters(), "tied tables are one"


def test_a_converted_gemma_has_its_tokenizer(write_gguf: Write, make_config: MakeConfig, tmp_path: Path) -> None:
    """Gemma's quality halves without the mark at the start of its texts."""
    path = write_gguf("gemma3", build_model(**MODELS["gemma3"]))
    tokenizer = load_tokenizer(locate_checkpoint(str(path), tmp_path / "scratch"))
    text = "abc  de"
    assert tokenizer(text)["input_ids"][0] == 2
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    assert predict(make_config(path, sparsity=0.1)).result_bytes > 0


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma2", "attention.scale", 0.1),
        ("falcon", "attention.head_count_kv", 2),
        ("gemma", "rope.dimension_sections", 8),
        ("stablelm", "use_parallel_residual", True),
        ("starcoder2", "attention.sliding_window", 7),
    ],
)
def test_what_a_family_does_not_have_is_refused(
    name: str, key: str, value: float, write_gguf: Write, make_config: MakeConfig
) -> None:
    path = write_gguf(name, build_model(**MODELS[name]), **{key: value})
    with pytest.raises(CheckpointError):
        predict(make_config(path))


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("starcoder", ["Ġ", "1", "2", "3", "4", "Ġto", "Ġx", "5"]),
        ("stablelm2", ["Ġ", "1", "2", "3", "4", "Ġto", "Ġx", "5"]),
        ("glm4", ["Ġ", "123", "4", "Ġto", "Ġx", "5"]),
        ("falcon", ["Ġ", "123", "4", "Ġto", "Ġx", "5"]),
        ("hunyuan-dense", ["Ġ", "123", "4", "Ġto", "Ġx", "5"]),
    ],
)
def test_texts_are_cut_as_llama_cpp_cuts_them(kind: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in cutting(kind).pre_tokenize_str(" 1234 to x5")] == pieces


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma4"])
def test_a_tokenizer_has_the_tokens_of_its_file_alone(kind: str) -> None:
    """Classes add their own special tokens, such as `<|endoftext|>`, which have no row of the embedding."""
    pieces = [*bytes_to_unicode().values(), "ab"] if kind == "gpt2" else ["\u2581", "a", "b", "ab"]
    special = {"<start>": 3, "<｜end▁of▁text｜>": 3, "<think>": 4}
    tokens = [*pieces, *special]
    content = {
        "tokenizer_type": kind,
        "tokens": tokens,
        "token_type": [1] * len(pieces) + list(special.values()),
        "merges": ["a b"],
    }
    tokenizer = with_the_files_tokens(convert_gguf_tokenizer("llama", content)[0], content)
    assert tokenizer.get_vocab() == {token: number for number, token in enumerate(tokens)}
    assert [tokenizer.encode(name).tokens[-1] for name in special] == list(special)
    assert max(tokenizer.encode("ab<s></s><unk><pad><mask><|endoftext|>").ids) < len(pieces)


def test_an_unknown_way_to_cut_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="superbpe"):
        cutting("superbpe")
