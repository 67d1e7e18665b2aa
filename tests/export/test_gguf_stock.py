"""The form gguf of families in their own architecture, read back by the reader of any GGUF file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES
from rotary import LLAMA3_ROTARY

from oneshot import OneshotError
from oneshot.checkpoint import open_gguf
from oneshot.evaluation import evaluate, load_model
from oneshot.export import open_folder
from oneshot.pipeline import compress, predict

CPU = torch.device("cpu")
TOKEN_IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(1))
GLOBAL, LOCAL = "full_attention", "sliding_attention"
GEMMA3 = {**CASES["gemma3_text"].options, "query_pre_attn_scalar": 8}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0}
PLAIN = {"rope_type": "default", "rope_theta": 50.0}
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "gemma": (CASES["gemma"].options, "gemma"),
    "gemma2": ({**CASES["gemma2"].options, "query_pre_attn_scalar": 8}, "gemma2"),
    "gemma3": ({**GEMMA3, "layers": 7, "layer_types": None}, "gemma3"),
    "gemma3-capped": ({**GEMMA3, "layers": 7, "layer_types": None, "final_logit_softcapping": 2.0}, "gemma3"),
    "gemma3-other-windows": ({**GEMMA3, "layer_types": [GLOBAL, LOCAL, LOCAL]}, "gemma3"),
    "gemma3-without-windows": ({**GEMMA3, "layer_types": [GLOBAL] * 3}, "gemma3"),
    "gemma3-scaled": (
        {**GEMMA3, "rope_parameters": GEMMA3["rope_parameters"] | {GLOBAL: LINEAR}},
        "gemma3",
    ),
}
WHOLE = [GLOBAL, LOCAL, GLOBAL, LOCAL, LOCAL]
NORMS = {
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.1.attn_q_norm.weight": "model.layers.1.self_attn.q_norm.weight",
    "blk.1.post_ffw_norm.weight": "model.layers.1.post_feedforward_layernorm.weight",
}


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the metadata and the tensors of a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


@pytest.mark.parametrize(("options", "architecture"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sparsity", [0.0, 0.3], ids=("whole", "smaller"))
def test_the_file_is_the_stock_result(
    options: dict[str, Any],
    architecture: str,
    sparsity: float,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
) -> None:
    """Read again it has the config, the tensors and the logits of the stock form, but for the rounding of norms."""
    folder = make_checkpoint(**options)
    reports = {
        name: compress(make_config(folder, form=name, sparsity=sparsity, output=str(tmp_path / name)))
        for name in ("gguf", "stock")
    }
    assert reports["gguf"].stored_parameters == reports["stock"].stored_parameters
    path = tmp_path / "gguf" / "model.gguf"
    fields, tensors = read(path)
    assert fields["general.architecture"] == architecture
    source = open_gguf(str(path))
    assert source is not None
    stock = load_model(tmp_path / "stock", device=CPU, dtype=torch.float32)
    wanted = stock.state_dict()
    for name, tensor in source.read(source.shapes).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2e-7)
    for name, own in NORMS.items():  # as the converter stores them
        if own in wanted:
            np.testing.assert_array_equal(tensors[name], wanted[own].numpy() + np.float32(1))
    with torch.inference_mode():
        logits = stock(TOKEN_IDS).logits
    for number, place in enumerate((path, path.parent)):  # what evaluate and chat open
        (scratch := tmp_path / f"scratch-{number}").mkdir()
        with torch.inference_mode():
            opened = load_model(open_folder(str(place), scratch), device=CPU, dtype=torch.float32)
            torch.testing.assert_close(opened(TOKEN_IDS).logits, logits, rtol=1e-5, atol=1e-5)


def test_metadata_are_the_converters(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """As `convert_hf_to_gguf.py` states them, but for the base of windows, which it leaves out where it is 10,000."""
    config = make_config(make_checkpoint(**MODELS["gemma3"][0]), form="gguf", sparsity=0.0)
    compress(config)
    fields, _ = read(Path(config.output) / "model.gguf")
    stated = {name.removeprefix("gemma3."): value for name, value in fields.items() if name.startswith("gemma3.")}
    assert stated == {
        "context_length": 512,
        "embedding_length": 32,
        "block_count": 7,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.sliding_window": 7,
        "rope.freq_base": 900.0,
        "rope.freq_base_swa": 50.0,
    }


def test_layers_that_are_left_out_take_their_windows_along(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_checkpoint(**GEMMA3 | {"layers": 5, "layer_types": WHOLE})
    settings: dict[str, Any] = {"depth": "sensitivity", "ffn": "none", "correction": "none", "sparsity": 0.3}
    for name in ("gguf", "stock"):
        compress(make_config(folder, form=name, output=str(tmp_path / name), **settings))
    source = open_gguf(str(tmp_path / "gguf" / "model.gguf"))
    assert source is not None
    stock = load_model(tmp_path / "stock", device=CPU, dtype=torch.float32)
    assert 1 < stock.config.num_hidden_layers < 5, "and no such number has llama.cpp's own pattern"
    assert source.config["layer_types"] == stock.config.layer_types
    loaded = source.load(device=CPU, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(TOKEN_IDS).logits, stock(TOKEN_IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("gemma3", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar: 20"),
        ("gemma3", {"attention_bias": True}, "attention_bias: True"),
        ("gemma3", {"model_class": "AutoModel"}, "no output head; use --form stock"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation: silu"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping: None"),
        ("gemma", {"tied": False}, "tie_word_embeddings: False"),
        ("gemma2", {"tied": False}, "tie_word_embeddings: False"),
        ("gemma2", {"layers": 2, "layer_types": ["full_attention"] * 2}, "no layer has a sliding window"),
        (
            "gemma3",
            {"rope_parameters": {GLOBAL: LINEAR, LOCAL: LINEAR}},
            r"\(rope_parameters.sliding_attention.rope_type: linear\)",
        ),
        ("gemma3", {"rope_parameters": {GLOBAL: DYNAMIC, LOCAL: PLAIN}}, "the type dynamic"),
        ("gemma", {"rope_parameters": LLAMA3_ROTARY}, r"\(rope_parameters.rope_type: llama3\)"),
        ("gemma2", {"rope_parameters": LLAMA3_ROTARY}, r"\(rope_parameters.rope_type: llama3\)"),
        (
            "gemma3",
            {"rope_parameters": {GLOBAL: LLAMA3_ROTARY, LOCAL: PLAIN}},
            r"\(rope_parameters.full_attention.rope_type: llama3\)",
        ),
    ],
    ids=(
        "scale",
        "biases",
        "headless",
        "activation",
        "uncapped",
        "own head",
        "own head of gemma2",
        "no windows",
        "scaled windows",
        "dynamic positions",
        "factors of gemma",
        "factors of gemma2",
        "factors of gemma3",
    ),
)
def test_what_it_cannot_state_is_refused(
    name: str, options: dict[str, Any], sentence: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(OneshotError, match=sentence):
        predict(make_config(make_checkpoint(**MODELS[name][0] | options), form="gguf"))


def test_a_result_is_measured_by_its_folder(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(**MODELS["gemma3"][0]), form="gguf")
    compress(config)
    folder = Path(config.output)
    options: dict[str, Any] = {"sequence_length": 32, "max_windows": 1, "decode_tokens": 0}
    of_folder, of_file = (
        evaluate([str(place)], [config.text.calibration], **options)[0] for place in (folder, folder / "model.gguf")
    )
    assert of_folder.file_bytes == of_file.file_bytes == (folder / "model.gguf").stat().st_size
    assert of_folder.perplexity == of_file.perplexity
    assert (folder / "imatrix.gguf").is_file()
    assert "llama-server" in (folder / "README.md").read_text()
